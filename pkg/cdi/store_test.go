package cdi

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

const claimUID = types.UID("7e5b1f5e-3a10-4bd1-8a53-8d6b27c6b0a1")

// wholeGPU returns the edits of one GPU. Its device node on the host is /dev/null, because every
// machine has that.
func wholeGPU() specs.ContainerEdits {
	return specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0", HostPath: "/dev/null", Permissions: "rw"}}}
}

func commonEdits() specs.ContainerEdits {
	return specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl", HostPath: "/dev/zero", Permissions: "rw"}},
		Mounts: []*specs.Mount{{HostPath: "/usr/lib/libcuda.so.1", ContainerPath: "/usr/lib/libcuda.so.1",
			Options: []string{"ro", "rbind"}}},
		Hooks: []*specs.Hook{{HookName: "createContainer", Path: "/opt/nvidia-cdi-hook",
			Args: []string{"nvidia-cdi-hook", "update-ldcache"}}},
	}
}

func newStore(t *testing.T) *Store {
	t.Helper()
	return NewStore(filepath.Join(t.TempDir(), "cdi"))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func writeClaim(s *Store, uid types.UID) error {
	return s.WriteClaim(uid, []specs.Device{{Name: ClaimDeviceName(uid, "gpu-0000-1b-00-0", nil), ContainerEdits: wholeGPU()}})
}

func TestDeviceIDs(t *testing.T) {
	for want, got := range map[string]string{
		"k8s.gpu.nvidia.com/base=driver":           BaseID,
		"k8s.gpu.nvidia.com/claim=uid-gpu-0":       ClaimDeviceID("uid", "gpu-0", nil),
		"k8s.gpu.nvidia.com/claim=uid-gpu-0-share": ClaimDeviceID("uid", "gpu-0", ptr.To(types.UID("share"))),
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestRuntimeInjectsBaseAndClaimSpecs(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	must(t, s.WriteClaim(claimUID, []specs.Device{
		{Name: ClaimDeviceName(claimUID, "gpu-a", nil), ContainerEdits: wholeGPU()},
		{Name: ClaimDeviceName(claimUID, "gpu-b", nil),
			ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia1", HostPath: "/dev/full"}}}},
	}))
	runtime, err := cdilib.NewCache(cdilib.WithSpecDirs(s.root), cdilib.WithAutoRefresh(false))
	must(t, err)
	container := &oci.Spec{}
	if _, err := runtime.InjectDevices(container, BaseID, ClaimDeviceID(claimUID, "gpu-a", nil), BaseID,
		ClaimDeviceID(claimUID, "gpu-b", nil)); err != nil {
		t.Fatal(err, runtime.GetErrors())
	}
	var nodes []string
	for _, d := range container.Linux.Devices {
		nodes = append(nodes, d.Path)
		if d.Type != "c" || d.Major != 1 {
			t.Errorf("%s is %s %d:%d: want the host's numbers", d.Path, d.Type, d.Major, d.Minor)
		}
	}
	if diff := cmp.Diff([]string{"/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1"}, nodes); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"NVIDIA_VISIBLE_DEVICES=void"}, container.Process.Env); diff != "" {
		t.Error(diff)
	}
	if len(container.Mounts) != 1 || len(container.Hooks.CreateContainer) != 1 {
		t.Errorf("got spec-level edits %d and %d times, want once", len(container.Mounts), len(container.Hooks.CreateContainer))
	}
}

func TestSpecOfOneGPUIsUnderOneKilobyte(t *testing.T) {
	s := newStore(t)
	must(t, writeClaim(s, claimUID))
	data, err := os.ReadFile(filepath.Join(s.root, "k8s.gpu.nvidia.com-claim_"+string(claimUID)+".json"))
	must(t, err)
	if len(data) > 1024 {
		t.Errorf("it has %d bytes", len(data))
	}
	var spec specs.Spec
	must(t, json.Unmarshal(data, &spec))
	if want, _ := specs.MinimumRequiredVersion(&spec); spec.Version != want {
		t.Errorf("version is %s, want the lowest, %s", spec.Version, want)
	}
}

func TestSpecsAreWorldReadableWithoutLeftovers(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	must(t, writeClaim(s, claimUID))
	entries, err := os.ReadDir(s.root)
	must(t, err)
	var names []string
	for _, e := range entries {
		info, err := e.Info()
		must(t, err)
		names = append(names, e.Name()+" "+info.Mode().String())
	}
	if diff := cmp.Diff([]string{
		"k8s.gpu.nvidia.com-base.json -rw-r--r--",
		"k8s.gpu.nvidia.com-claim_" + string(claimUID) + ".json -rw-r--r--",
	}, names); diff != "" {
		t.Error(diff)
	}
}

func TestUnchangedSpecIsNotRewritten(t *testing.T) {
	s := newStore(t)
	path := filepath.Join(s.root, baseFile)
	must(t, s.WriteBase(commonEdits()))
	before, err := os.Stat(path)
	must(t, err)
	must(t, NewStore(s.root).WriteBase(commonEdits()))
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Error("the file was replaced without need", err)
	}
	changed := commonEdits()
	changed.Env = []string{"A=b"}
	must(t, s.WriteBase(changed))
	if after, err := os.Stat(path); err != nil || os.SameFile(before, after) {
		t.Error("the file was not replaced", err)
	}
}

func TestClaimsListsAndRemovesSpecs(t *testing.T) {
	s := newStore(t)
	if claims, err := s.Claims(); err != nil || len(claims) != 0 {
		t.Error("without the directory:", claims, err)
	}
	must(t, s.WriteBase(commonEdits()))
	must(t, writeClaim(s, "b"))
	must(t, writeClaim(s, "a"))
	must(t, os.WriteFile(filepath.Join(s.root, "nvidia.yaml"), nil, 0o600))
	claims, err := s.Claims()
	must(t, err)
	if diff := cmp.Diff([]types.UID{"a", "b"}, claims); diff != "" {
		t.Error(diff)
	}
	for range 2 { // the second time, the spec is already gone
		must(t, s.RemoveClaim("a"))
		must(t, s.RemoveBase())
	}
	if claims, err = s.Claims(); err != nil || len(claims) != 1 {
		t.Error(claims, err)
	}
	must(t, s.RemoveClaim("b"))
	entries, err := os.ReadDir(s.root)
	if must(t, err); len(entries) != 1 {
		t.Error("want only the foreign file:", entries)
	}
}

func TestWriteRejectsInvalidSpecs(t *testing.T) {
	named := func(name string, e specs.ContainerEdits) []specs.Device {
		return []specs.Device{{Name: ClaimDeviceName(claimUID, name, nil), ContainerEdits: e}}
	}
	a := ClaimDeviceName(claimUID, "a", nil)
	for _, tc := range []struct {
		name    string
		devices []specs.Device
		says    string
	}{
		{"no devices", nil, "no devices"},
		{"no edits", named("a", specs.ContainerEdits{}), "empty device edits"},
		{"name", named("a/b", wholeGPU()), "a/b"},
		{"twice", append(named("a", wholeGPU()), named("a", wholeGPU())...), `multiple device "` + a},
		{"device node", named("a", specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{}}}), `device "` + a},
		{"environment", named("a", specs.ContainerEdits{Env: []string{"no equals sign"}}), `device "` + a},
	} {
		s := newStore(t)
		if err := s.WriteClaim(claimUID, tc.devices); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: error is %v, want one that says %q", tc.name, err, tc.says)
		}
		if claims, _ := s.Claims(); len(claims) > 0 {
			t.Errorf("%s: the spec was written", tc.name)
		}
	}
	s := newStore(t)
	for range 2 { // the second time, after a valid spec
		if err := s.WriteBase(specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "never"}}}); err == nil {
			t.Error("a base spec with an unknown hook was written")
		}
		must(t, s.WriteBase(commonEdits()))
	}
}

func TestClaimUIDCannotEscapeDirectory(t *testing.T) {
	s := newStore(t)
	for _, uid := range []types.UID{"", "../../etc/passwd", "a/b", "a\x00b"} {
		if writeClaim(s, uid) == nil || s.RemoveClaim(uid) == nil {
			t.Errorf("UID %q was accepted", uid)
		}
	}
}

func TestWriteFailsOnUnwritableDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	s := NewStore(filepath.Join(file, "cdi"))
	if err := s.WriteBase(commonEdits()); err == nil || !strings.Contains(err.Error(), "write CDI spec") {
		t.Error(err)
	}
	if _, err := s.Claims(); err == nil {
		t.Error("listed a file as a directory")
	}
	if err := s.RemoveClaim("a"); err == nil {
		t.Error("removed a spec from a file")
	}
}

func TestRemoveBaseRemovesLeftoverTemporaryFiles(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	theirs := filepath.Join(s.root, ".vendor.example.com-base.json.tmp-1")
	for _, path := range []string{filepath.Join(s.root, ".k8s.gpu.nvidia.com-base.json.tmp-1234"), theirs} {
		must(t, os.WriteFile(path, []byte("half"), 0o600))
	}
	must(t, s.RemoveBase())
	left, err := os.ReadDir(s.root)
	must(t, err)
	if len(left) != 1 || left[0].Name() != filepath.Base(theirs) {
		t.Errorf("left: %v", left)
	}
}

func TestClaimSpecRejectsDeviceOfAnotherClaim(t *testing.T) {
	s := NewStore(t.TempDir())
	edits := specs.ContainerEdits{Env: []string{"A=b"}}
	for _, name := range []string{ClaimDeviceName("uid-2", "gpu-0", nil), "uid-1", "uid-11-gpu-0", "driver", ""} {
		devices := []specs.Device{
			{Name: ClaimDeviceName("uid-1", "gpu-0", nil), ContainerEdits: edits}, {Name: name, ContainerEdits: edits},
		}
		if err := s.WriteClaim("uid-1", devices); err == nil {
			t.Errorf("device %q was written into the spec of claim uid-1", name)
		}
	}
	if uids, err := s.Claims(); err != nil || len(uids) != 0 {
		t.Errorf("left %v, %v", uids, err)
	}
}

// What the store accepts, a runtime must read back unchanged, whatever text the spec has.
func TestRuntimeReadsCheckedSpecs(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		text := make([]byte, random.IntN(40))
		for i := range text {
			text[i] = byte(random.IntN(128))
		}
		if random.IntN(50) == 0 {
			text = bytes.Repeat([]byte("text: "), 200) // longer than YAML takes the names of fields to be
		}
		spec := &specs.Spec{Kind: ClaimKind, Devices: []specs.Device{
			{Name: "gpu", ContainerEdits: specs.ContainerEdits{Env: []string{"TEXT=" + string(text)}}},
		}}
		data, err := encode(spec)
		must(t, err)
		if err := check(data); err != nil {
			if !bytes.ContainsRune(text, 0x7f) {
				t.Errorf("%q was refused: %v", text, err)
			}
			continue
		}
		read, err := cdilib.ParseSpec(data)
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if diff := cmp.Diff(spec, read); diff != "" {
			t.Error(diff)
		}
	}
}

// A runtime may refuse a spec whose version is older than what one of its devices needs, whichever
// of the devices that is.
func TestVersionIsThatOfTheMostDemandingDevice(t *testing.T) {
	node := specs.Device{Name: "uid-1-a", ContainerEdits: specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0", HostPath: "/driver/dev/nvidia0"}}, // since 0.5.0
	}}
	mount := specs.Device{Name: "uid-1-b", ContainerEdits: specs.ContainerEdits{
		Mounts: []*specs.Mount{{HostPath: "/a", ContainerPath: "/b"}},
	}}
	groups := specs.Device{Name: "uid-1-c", ContainerEdits: specs.ContainerEdits{AdditionalGIDs: []uint32{104}}} // since 0.7.0
	for _, devices := range [][]specs.Device{{groups}, {groups, node}, {node, groups}} {
		if _, claim, err := Render(specs.ContainerEdits{}, devices); err != nil || !strings.Contains(string(claim), `"cdiVersion":"0.7.0"`) {
			t.Errorf("%s, %v", claim, err)
		}
	}
	for _, devices := range [][]specs.Device{{node}, {node, mount}, {mount, node}} {
		_, claim, err := Render(specs.ContainerEdits{}, devices)
		if err != nil || !strings.Contains(string(claim), `"cdiVersion":"0.5.0"`) {
			t.Errorf("%s, %v", claim, err)
		}
	}
}
