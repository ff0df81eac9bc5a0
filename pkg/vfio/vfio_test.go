package vfio

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// tree is a temporary sysfs.
type tree struct{ dir string }

// add adds a PCI function with these files. The values of group, driver and physfn are links.
func (s tree) add(t *testing.T, address string, files map[string]string) {
	t.Helper()
	dir := filepath.Join(s.dir, "bus/pci/devices", address)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(dir, 0o755))
	for name, value := range files {
		switch name {
		case "iommu_group":
			group := filepath.Join(s.dir, "kernel/iommu_groups", value)
			must(os.MkdirAll(filepath.Join(group, "devices"), 0o755))
			must(os.Symlink(dir, filepath.Join(group, "devices", address)))
			must(os.Symlink(group, filepath.Join(dir, name)))
		case "driver", "physfn":
			must(os.Symlink(filepath.Join("../../drivers", value), filepath.Join(dir, name)))
		default:
			must(os.WriteFile(filepath.Join(dir, name), []byte(value+"\n"), 0o644))
		}
	}
}

func gpuFiles(group string) map[string]string {
	return map[string]string{
		"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "driver": "nvidia", "driver_override": "(null)",
		"iommu_group": group, "reset_method": "flr bus", "sriov_numvfs": "0",
		"modalias": "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00",
	}
}

func with(files map[string]string, name, value string) map[string]string {
	files[name] = value
	if value == "" {
		delete(files, name)
	}
	return files
}

const gpu device.PCIAddress = "0000:1b:00.0"

func TestGroupHasCompanionsOfSlotAndGroupWithoutBridges(t *testing.T) {
	s := tree{t.TempDir()}
	s.add(t, string(gpu), gpuFiles("17"))
	s.add(t, "0000:1b:00.1", map[string]string{
		"class": "0x040300", "vendor": "0x10de", "device": "0x22ba", "driver": "snd_hda_intel", "iommu_group": "17",
	})
	s.add(t, "0000:1b:00.2", map[string]string{"class": "0x0c0330", "vendor": "0x10de", "device": "0x1ad6"}) // in no group
	s.add(t, "0000:1a:00.0", map[string]string{
		"class": "0x060400", "vendor": "0x8086", "device": "0x1234", "driver": "pcieport", "iommu_group": "17",
	})
	s.add(t, "0000:1c:00.0", gpuFiles("18"))
	g, err := Read(s.dir, gpu)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, c := range g.Companions {
		names = append(names, string(c.Address)+" "+c.Driver)
	}
	if !slices.Equal(names, []string{"0000:1b:00.1 snd_hda_intel", "0000:1b:00.2 "}) {
		t.Errorf("companions %q", names)
	}
	if g.Number != 17 || g.NoIOMMU || !slices.Equal(g.ResetMethods, []string{"flr", "bus"}) || g.GPU.Class != 0x0302 ||
		g.GPU.Driver != "nvidia" || g.GPU.Override != "" || g.GPU.Bound() || g.Refusal() != "" {
		t.Errorf("%+v: %s", g, g.Refusal())
	}
}

// modeset loads nvidia_drm with this parameter, and NVIDIA's driver in this version.
func modeset(parameter, version string) func(*testing.T, tree) {
	return func(t *testing.T, s tree) {
		t.Helper()
		for name, value := range map[string]string{"module/nvidia_drm/parameters/modeset": parameter, "module/nvidia/version": version} {
			file := filepath.Join(s.dir, name)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestRefusalNamesWhatStandsInTheWay(t *testing.T) {
	neighbor := func(driver string) func(*testing.T, tree) {
		return func(t *testing.T, s tree) {
			t.Helper()
			s.add(t, "0000:1c:00.0", map[string]string{
				"class": "0x020000", "vendor": "0x8086", "device": "0x1572", "iommu_group": "17", "driver": driver,
			})
		}
	}
	display := func(address, class, group, driver string) func(*testing.T, tree) {
		return func(t *testing.T, s tree) {
			t.Helper()
			files := with(with(gpuFiles(group), "class", class), "driver", driver)
			s.add(t, address, with(files, "iommu_group", group))
		}
	}
	for name, tc := range map[string]struct {
		files map[string]string
		more  func(*testing.T, tree)
		want  string // empty: not refused
	}{
		"no IOMMU":          {files: with(gpuFiles("17"), "iommu_group", ""), want: "no IOMMU group"},
		"unsafe mode":       {files: gpuFiles("17"), want: "without an IOMMU", more: unsafeMode},
		"no reset":          {files: with(gpuFiles("17"), "reset_method", ""), want: "cannot reset"},
		"resets disabled":   {files: with(with(gpuFiles("17"), "reset_method", " "), "reset", "1"), want: "cannot reset"},
		"before Linux 5.15": {files: with(with(gpuFiles("17"), "reset_method", ""), "reset", "1")},
		"virtual functions": {files: with(gpuFiles("17"), "sriov_numvfs", "4"), want: "4 of its virtual functions"},
		"a virtual GPU":     {files: with(gpuFiles("17"), "physfn", "0000:1a:00.0"), want: "virtual function of another"},
		"another vendor":    {files: with(gpuFiles("17"), "vendor", "0x1002"), want: "0x1002"},
		"a card in use":     {files: gpuFiles("17"), more: neighbor("i40e"), want: "0000:1c:00.0, which driver i40e uses"},
		"a card with VFIO":  {files: gpuFiles("17"), more: neighbor("vfio-pci")},
		"a GPU with VFIO":   {files: gpuFiles("17"), more: display("0000:1c:00.0", "0x030200", "17", "vfio-pci"), want: "0000:1c:00.0"},
		"a GPU in use":      {files: gpuFiles("17"), more: display("0000:1c:00.0", "0x030000", "17", "nvidia"), want: "0000:1c:00.0"},
		"a GPU, no driver":  {files: gpuFiles("17"), more: display("0000:1c:00.0", "0x038000", "17", ""), want: "0000:1c:00.0"},
		"a GPU in its slot": {files: gpuFiles("17"), more: display("0000:1b:00.4", "0x030200", "", "vfio-pci"), want: "0000:1b:00.4"},
		"both without": {
			files: with(gpuFiles("17"), "driver", ""), more: display("0000:1c:00.0", "0x030200", "17", ""), want: "0000:1c:00.0",
		},
		"a GPU elsewhere":  {files: gpuFiles("17"), more: display("0000:1c:00.0", "0x030200", "18", "nvidia")},
		"modeset":          {files: gpuFiles("17"), more: modeset("Y", "580.95.05"), want: "nvidia_drm modeset=0"},
		"modeset, 570":     {files: gpuFiles("17"), more: modeset("Y", "570.211.01"), want: "580.105.08"},
		"modeset, unknown": {files: gpuFiles("17"), more: modeset("Y", "new"), want: "nvidia_drm modeset=0"},
		"modeset is safe":  {files: gpuFiles("17"), more: modeset("Y", "580.105.08")},
		"modeset, newer":   {files: gpuFiles("17"), more: modeset("Y", "595.45.04")},
		"no modeset":       {files: gpuFiles("17"), more: modeset("N", "580.95.05")},
		"modeset, unbound": {files: with(gpuFiles("17"), "driver", ""), more: modeset("Y", "580.95.05")},
		"bound at boot":    {files: with(gpuFiles("17"), "driver", "nvgrace_gpu_vfio_pci")},
		"no driver at all": {files: with(gpuFiles("17"), "driver", "")},
	} {
		t.Run(name, func(t *testing.T) {
			s := tree{t.TempDir()}
			s.add(t, string(gpu), tc.files)
			if tc.more != nil {
				tc.more(t, s)
			}
			g, err := Read(s.dir, gpu)
			if err != nil {
				t.Fatal(err)
			}
			if got := g.Refusal(); (got == "") != (tc.want == "") || !strings.Contains(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
			if bound := g.GPU.Bound(); bound != (name == "bound at boot") {
				t.Errorf("bound to VFIO: %v", bound)
			}
		})
	}
}

func unsafeMode(t *testing.T, s tree) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, "kernel/iommu_groups/17/name"), []byte("vfio-noiommu\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestUnreadableFactsAreErrors(t *testing.T) {
	for _, name := range []string{"class", "vendor", "device", "sriov_numvfs"} {
		s := tree{t.TempDir()}
		s.add(t, string(gpu), with(gpuFiles("17"), name, "many"))
		if _, err := Read(s.dir, gpu); err == nil || !strings.Contains(err.Error(), string(gpu)) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, err := Read(t.TempDir(), gpu); err == nil {
		t.Error("a function that does not exist was read")
	}
}

func TestModuleWithFewestWildcardsIsChosen(t *testing.T) {
	const aliases = `# comment
alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci
`
	for alias, want := range map[string]string{
		"pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00": "nvgrace_gpu_vfio_pci",
		"pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00": "vfio_pci",
	} {
		if got, err := Module(aliases, Function{ModAlias: alias}); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", alias, got, err, want)
		}
	}
	if got, err := Module("", Function{ModAlias: "pci:v1"}); err != nil || got != "vfio_pci" {
		t.Errorf("without aliases: %q, %v", got, err)
	}
	if _, err := Module(aliases, Function{Address: gpu, ModAlias: "usb:v1"}); err == nil {
		t.Error("an alias of another bus was accepted")
	}
	if _, err := Module("alias vfio_pci:[ x\n", Function{ModAlias: "pci:v1"}); err == nil {
		t.Error("an invalid pattern was accepted")
	}
}
