package scan

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// scanSite scans the site in a child process.
func scanSite(s nvidiatest.Site) (nvidia.Node, error) {
	return Isolated(s.Paths(), s.Role("scan")...)(context.Background())
}

func mustScan(s nvidiatest.Site) nvidia.Node {
	s.T.Helper()
	node, err := scanSite(s)
	if err != nil {
		s.T.Fatal(err)
	}
	return node
}

func TestScanFindsDescribedNodes(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(nvidiatest.Simulator, "nodes", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatal("no nodes", err)
	}
	models, err := model.ReadGPUs(filepath.Join(nvidiatest.Simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			found := mustScan(nvidiatest.NewSite(t, name, layout.Container, ""))
			want, err := model.ReadNode(file, nvidiatest.Seed)
			if err != nil {
				t.Fatal(err)
			}
			if found.Driver.Version != want.DriverVersion || found.Driver.CUDAVersion != want.CUDAVersion {
				t.Errorf("driver is %v, want %s and %s", found.Driver, want.DriverVersion, want.CUDAVersion)
			}
			if len(found.GPUs) != len(want.GPUs) || len(found.Problems) > 0 {
				t.Fatalf("%d GPUs, problems %v; want %d", len(found.GPUs), found.Problems, len(want.GPUs))
			}
			for i, g := range found.GPUs {
				checkGPU(t, g, want.GPUs[i], models[want.GPUs[i].Model])
			}
		})
	}
}

// architectureNames are the values of the device attribute architecture that the tests expect, by
// NVML's number of the architecture.
var architectureNames = map[uint32]string{
	nvml.DEVICE_ARCH_PASCAL: "Pascal", nvml.DEVICE_ARCH_TURING: "Turing", nvml.DEVICE_ARCH_AMPERE: "Ampere",
	nvml.DEVICE_ARCH_ADA:    "Ada Lovelace",
	nvml.DEVICE_ARCH_HOPPER: "Hopper", nvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
}

func checkGPU(t *testing.T, g nvidia.GPU, card model.Card, m *model.GPU) {
	t.Helper()
	type facts struct {
		address, uuid, root, name, brand, architecture, capability, addressing string
		minor, numa                                                            int
		mib                                                                    uint64
		engines                                                                bool
	}
	numa := -1
	if g.NUMANode != nil {
		numa = *g.NUMANode
	}
	got := facts{
		string(g.PCIAddress), g.UUID, g.PCIeRoot, g.ProductName, g.Brand, g.Architecture, g.CUDAComputeCapability, g.AddressingMode,
		g.Minor, numa, g.MemoryBytes >> 20, g.Engines != nil,
	}
	want := facts{
		card.PCI, card.UUID, card.PCIRoot, m.ProductName.Value, m.Brand.Value, architectureNames[m.Architecture.NVMLValue],
		m.CUDAComputeCapability.Value,
		addressingMode(m), int(*card.Minor), int(card.NUMANode), m.MemoryTotalMiB.Value, m.MIG.Supported.Value,
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(facts{})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(describedMIG(card, m), g.MIG, cmpopts.IgnoreFields(device.MIG{}, "Instances")); diff != "" {
		t.Error(diff)
	}
	if want := expectedInstances(card); g.MIG != nil && len(g.MIG.Instances) != want {
		t.Errorf("found %d instances, want %d: %+v", len(g.MIG.Instances), want, g.MIG.Instances)
	}
	if len(g.Edits.DeviceNodes) != 1 || len(g.Edits.Hooks)+len(g.Edits.Mounts)+len(g.Edits.Env) > 0 {
		t.Errorf("its edits are %+v", g.Edits)
	}
}

// addressingMode returns the addressing mode that a scan should report for the model. It is empty
// if NVML does not support the query.
func addressingMode(m *model.GPU) string {
	if m.AddressingMode.Value == "NotSupported" {
		return ""
	}
	if m.AddressingMode.Known {
		return m.AddressingMode.Value
	}
	return "None"
}

func TestEveryDriverLayoutIsComplete(t *testing.T) {
	for _, tc := range []struct {
		kind   layout.Kind
		libdir string
	}{
		{layout.Host, ""}, {layout.Container, ""}, {layout.Bare, ""},
		{layout.Container, "usr/lib/x86_64-linux-gnu/nvidia/current"}, {layout.Host, "usr/local/nvidia/lib64"},
	} {
		t.Run(string(tc.kind)+" "+tc.libdir, func(t *testing.T) {
			node := mustScan(nvidiatest.NewSite(t, "t4-x1", tc.kind, tc.libdir))
			if len(node.GPUs) != 1 {
				t.Fatal(node.Problems)
			}
			var links, folders string
			for _, h := range node.Common.Hooks {
				switch h.Args[1] {
				case "create-symlinks":
					links += strings.Join(h.Args, " ")
				case "update-ldcache":
					folders += strings.Join(h.Args, " ")
				}
			}
			if !strings.Contains(links, "libcuda.so.1") || !strings.Contains(folders, tc.libdir) {
				t.Errorf("libcuda.so.1 would not be found: links %s; folders %s", links, folders)
			}
		})
	}
}

// NVML itself is loaded through links that lead nowhere in this process's root, too.
func TestScanLoadsNVMLThroughAbsoluteLinks(t *testing.T) {
	s := nvidiatest.NewSite(t, "t4-x1", layout.Container, "opt/nvidia/580/lib64")
	libraries := filepath.Join(s.Root, "driver", "usr/lib64")
	if err := errors.Join(os.MkdirAll(filepath.Dir(libraries), 0o750), os.Symlink("/opt/nvidia/580/lib64", libraries)); err != nil {
		t.Fatal(err)
	}
	node := mustScan(s)
	if len(node.GPUs) != 1 || !hasFile(node.Common, "libcuda.so."+node.Driver.Version) {
		t.Fatal(node.Problems, node.Common.Mounts)
	}
	for _, m := range node.Common.Mounts {
		if strings.Contains(m.HostPath, "/lib64/") && !strings.HasPrefix(m.HostPath, "/run/nvidia/driver/opt/nvidia/580/lib64/") {
			t.Errorf("%s is mounted from %s", m.ContainerPath, m.HostPath)
		}
	}
}

func TestScanOffersHealthyGPUsOfBrokenNode(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	s.Change(func(_ *layout.Config, f *state.File) error {
		return errors.Join(
			f.AddFault(state.Fault{Kind: state.FaultFail, GPU: 2, Error: uint32(nvml.ERROR_GPU_IS_LOST)}, "*", 0),
			f.AddFault(state.Fault{Kind: state.FaultFail, GPU: 5, Error: uint32(nvml.ERROR_UNKNOWN)}, "nvmlDeviceGetMemoryInfo", 0),
		)
	})
	node := mustScan(s)
	if len(node.GPUs) != 6 || len(node.Problems) != 2 || node.Problems[0].PCIAddress != "0000:52:00.0" ||
		node.Problems[1].PCIAddress != "0000:c3:00.0" {
		t.Errorf("%d GPUs, problems %v", len(node.GPUs), node.Problems)
	}
}

func TestScanFollowsDriverUpgrade(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	first := mustScan(s)
	before := Fingerprint(s.Paths())

	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, false) })
	var unready *nvidia.NotReadyError
	if _, err := scanSite(s); !errors.As(err, &unready) {
		t.Errorf("without the driver: %v", err)
	}
	if Fingerprint(s.Paths()) == before {
		t.Error("the fingerprint ignores the driver's removal")
	}
	before = Fingerprint(s.Paths())
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverBack(f, "590.48.01", "13.1") })
	if Fingerprint(s.Paths()) == before {
		t.Error("the fingerprint ignores the new driver")
	}
	second := mustScan(s)
	if second.Driver.Version != "590.48.01" || second.Driver.CUDAVersion != "13.1" || !hasFile(second.Common, "libcuda.so.590.48.01") {
		t.Errorf("%v, %v", second.Driver, second.Common.Mounts)
	}
	for i := range first.GPUs {
		if first.GPUs[i].Binding == second.GPUs[i].Binding {
			t.Errorf("%s has the binding %q of before", second.GPUs[i].PCIAddress, second.GPUs[i].Binding)
		}
		second.GPUs[i].Binding = first.GPUs[i].Binding
	}
	if diff := cmp.Diff(first.GPUs, second.GPUs); diff != "" {
		t.Errorf("the GPUs changed:\n%s", diff)
	}
}

func TestBindingLastsAsLongAsTheNumbers(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	first := mustScan(s).GPUs
	holds := func(when string, want ...bool) {
		t.Helper()
		for i, g := range first {
			if now := Binding(s.Paths().Sysfs, g.PCIAddress); (now == g.Binding) != want[i] {
				t.Errorf("%s: the binding of %s is %q, and was %q", when, g.PCIAddress, now, g.Binding)
			}
		}
	}
	if again := mustScan(s).GPUs; first[0].Binding == "" || again[0].Binding != first[0].Binding {
		t.Fatalf("the bindings are %q and %q", first[0].Binding, again[0].Binding)
	}
	s.Change(func(_ *layout.Config, f *state.File) error { return f.Lose(0) })
	holds("a GPU is lost", true, true)
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, true) })
	holds("the driver is away", false, false)
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverBack(f, "", "") })
	holds("the driver is loaded again", false, false)
	if Binding(s.Paths().Sysfs, first[0].PCIAddress) != "" {
		t.Error("the lost GPU is bound")
	}
	left := mustScan(s).GPUs
	if len(left) != 1 || left[0].UUID != first[1].UUID || left[0].Minor != 0 || left[0].Edits.DeviceNodes[0].Path != "/dev/nvidia0" {
		t.Errorf("the GPU that is left: %+v", left)
	}
}

func TestNodeWithoutReadyStateIsNotReady(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	set := func(c state.ConfCompute) {
		s.Change(func(_ *layout.Config, f *state.File) error { return f.SetConfCompute(c) })
	}
	set(state.ConfComputeNotReady)
	var unready *nvidia.NotReadyError
	if _, err := scanSite(s); !errors.As(err, &unready) || !strings.Contains(err.Error(), "nvidia-smi conf-compute -srs 1") {
		t.Errorf("without the ready state: %v", err)
	}
	set(state.ConfComputeReady)
	if n := len(mustScan(s).GPUs); n != 8 {
		t.Errorf("with the ready state: %d GPUs", n)
	}
}

// The driver's own answer counts, whatever the generation of the card.
func TestFieldDecidesWhetherMIGNeedsReset(t *testing.T) {
	for node, fixed := range map[string]bool{"dgx-a100": true, "dgx-h100": false} {
		if got := mustScan(nvidiatest.NewSite(t, node, layout.Container, "")).GPUs[0].MIG.ModeFixed; got != fixed {
			t.Errorf("%s: ModeFixed is %v", node, got)
		}
	}
	handle := &mock.Device{GetFieldValuesFunc: func(values []nvml.FieldValue) nvml.Return {
		values[0].Value[0] = 1
		return nvml.SUCCESS
	}}
	if needsReset(handle) {
		t.Error("the card needs a reset although the driver says that it does not")
	}
}

// graphicsNode is a node with a card that is partitioned, two partitions with graphics, and a whole
// card.
func graphicsNode() *model.Node {
	card := model.Card{Model: "rtx-pro-6000-blackwell", PCI: "0000:1b:00.0", PCIRoot: "pci0000:15", MIG: &model.CardMIG{
		Enabled: true, Instances: []model.CardInstance{{Profile: 47, Start: 0}, {Profile: 14, Start: 1}, {Profile: 47, Start: 2}},
	}}
	whole := card
	whole.PCI, whole.MIG = "0000:3d:00.0", nil
	cards := []model.Card{card, whole}
	for i := range cards {
		minor, module := uint32(i), uint32(i+1)
		cards[i].Minor, cards[i].Module, cards[i].UUID = &minor, &module, fmt.Sprintf("GPU-00000000-0000-4000-8000-00000000000%d", i)
	}
	return &model.Node{Name: "graphics", DriverVersion: "580.105.08", CUDAVersion: "13.0", GPUs: cards, DRMNodes: true}
}

// graphicsOf returns the names of the DRM device nodes in e, and the links that its hooks make.
func graphicsOf(e specs.ContainerEdits) (nodes, links []string) {
	for _, n := range e.DeviceNodes {
		if name, ok := strings.CutPrefix(n.Path, "/dev/dri/"); ok {
			nodes = append(nodes, name)
		}
	}
	for _, h := range e.Hooks {
		for _, arg := range h.Args {
			if _, link, ok := strings.Cut(arg, "::/dev/dri/by-path/"); ok {
				links = append(links, link)
			}
		}
	}
	return nodes, links
}

// Since driver 575.51 each of the card's DRM devices belongs to one MIG device with graphics, and
// nothing on the host says to which.
func TestNoPartitionGetsDRMNodes(t *testing.T) {
	s := nvidiatest.NewSiteOf(t, graphicsNode(), layout.Host, "")
	node := mustScan(s)
	if names := host.GraphicsDevices(s.Paths().Sysfs, node.GPUs[0].PCIAddress); len(names) != 4 {
		t.Fatalf("the card with two graphics partitions has the DRM devices %v, want two pairs", names)
	}
	want := []string{"card34", "renderD162"}
	wantLinks := []string{"pci-0000:3d:00.0-card", "pci-0000:3d:00.0-render"}
	if nodes, links := graphicsOf(node.GPUs[1].Edits); !slices.Equal(nodes, want) || !slices.Equal(links, wantLinks) {
		t.Errorf("the whole GPU has %v and %v, want %v and %v", nodes, links, want, wantLinks)
	}
	found := map[string]int{}
	for _, in := range node.GPUs[0].MIG.Instances {
		for _, c := range in.Compute {
			found[c.Name]++
			if nodes, links := graphicsOf(CapabilityEdits(s.Paths(), node.GPUs[0].Edits, in, c)); len(nodes)+len(links) > 0 {
				t.Errorf("partition %s has %v and %v", c.Name, nodes, links)
			}
		}
	}
	if found["1g.24gb"] != 1 || found["1g.24gb+gfx"] != 2 {
		t.Errorf("the partitions are %v", found)
	}
}

// A program that drops root needs the groups that the host's udev gives the device nodes, as in the
// specs of nvidia-ctk cdi generate.
func TestDRMNodesHaveTheHostsGroups(t *testing.T) {
	s := nvidiatest.NewSiteOf(t, graphicsNode(), layout.Host, "")
	dri := filepath.Join(s.Root, "machine/dev/dri")
	for i, tc := range []struct {
		name        string
		mode        os.FileMode
		card        int
		own, groups []uint32
	}{
		{"as udev makes them", 0o660, 44, []uint32{44, 104}, []uint32{44, 104}},
		{"one group for both", 0o660, 104, []uint32{104, 104}, []uint32{104}},
		{"for everyone", 0o666, 44, []uint32{44, 104}, nil},
		{"card is root's", 0o660, 0, []uint32{0, 104}, []uint32{104}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := Fingerprint(s.Paths())
			card, render := filepath.Join(dri, "card34"), filepath.Join(dri, "renderD162")
			if err := errors.Join(os.Chown(card, 0, tc.card), os.Chmod(card, tc.mode), os.Chmod(render, tc.mode)); err != nil {
				t.Fatal(err)
			}
			if changed := i > 0; (Fingerprint(s.Paths()) != before) != changed {
				t.Error("the fingerprint ignores groups and modes")
			}
			node := mustScan(s)
			whole := node.GPUs[1].Edits
			var own []uint32
			for _, n := range whole.DeviceNodes {
				switch {
				case strings.HasPrefix(n.Path, "/dev/dri/"):
					own = append(own, ptr.Deref(n.GID, 0))
				case n.GID != nil:
					t.Errorf("%s has group %d", n.Path, *n.GID)
				}
			}
			if !slices.Equal(own, tc.own) || !slices.Equal(whole.AdditionalGIDs, tc.groups) {
				t.Errorf("the nodes have the groups %v, the containers %v, want %v and %v", own, whole.AdditionalGIDs, tc.own, tc.groups)
			}
			part := node.GPUs[0].MIG.Instances[0]
			if got := CapabilityEdits(s.Paths(), node.GPUs[0].Edits, part, part.Compute[0]).AdditionalGIDs; len(got) > 0 {
				t.Errorf("a partition without DRM nodes has the groups %v", got)
			}
			if common := node.Common.AdditionalGIDs; len(common) > 0 {
				t.Errorf("every container has the groups %v", common)
			}
		})
	}
}

// An admin may load nvidia-drm after the plugin has started.
func TestScanNoticesDRMNodes(t *testing.T) {
	described := graphicsNode()
	described.DRMNodes = false
	s := nvidiatest.NewSiteOf(t, described, layout.Host, "")
	before := Fingerprint(s.Paths())
	if nodes, links := graphicsOf(mustScan(s).GPUs[1].Edits); len(nodes)+len(links) > 0 {
		t.Errorf("without nvidia-drm the GPU has %v and %v", nodes, links)
	}
	s.Change(func(c *layout.Config, _ *state.File) error {
		c.Node.DRMNodes = true
		return c.Save()
	})
	if Fingerprint(s.Paths()) == before {
		t.Error("the fingerprint ignores the DRM devices")
	}
	if nodes, _ := graphicsOf(mustScan(s).GPUs[1].Edits); len(nodes) != 2 {
		t.Errorf("with nvidia-drm the GPU has %v", nodes)
	}
}

// Without a configured path the hook has its own default, /sbin/ldconfig.
func TestHookRunsConfiguredLdconfig(t *testing.T) {
	s := nvidiatest.NewSite(t, "t4-x1", layout.Container, "")
	for _, configured := range []string{"", "/run/current-system/sw/bin/ldconfig"} {
		p := s.Paths()
		p.LdconfigPath = configured
		node, err := Isolated(p, s.Role("scan")...)(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(node.Common.Hooks, func(h *specs.Hook) bool { return h.Args[1] == "update-ldcache" })
		if i < 0 {
			t.Fatalf("no hook updates the cache: %v", node.Common.Hooks)
		}
		_, args, _ := strings.Cut(strings.Join(node.Common.Hooks[i].Args, " "), "--ldconfig-path ")
		if path, _, _ := strings.Cut(args, " "); path != configured {
			t.Errorf("with %q the hook runs %q", configured, path)
		}
	}
}
