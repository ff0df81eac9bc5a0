package sysfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// The functions of nodes/vfio-awkward.yaml.
const (
	gpu0, audio0 = "0000:21:00.0", "0000:21:00.1"
	gpu1, audio1 = "0000:22:00.0", "0000:22:00.1"
	gpu2, gpu3   = "0000:61:00.0", "0000:62:00.0"
)

// buildLibrary builds the simulated NVML library, once for all tests.
var buildLibrary = sync.OnceValues(func() ([]byte, error) { return exec.Command("make", "-s", "-C", "..", "library").CombinedOutput() })

func TestBootShowsFunctionsGroupsAndDrivers(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	m.has(gpu0, "nvidia")
	m.has(audio0, "snd_hda_intel")
	m.has(audio1, "")
	m.reads("(null)\n", "bus/pci/devices", gpu0, "driver_override")
	m.reads("0x030200\n", "bus/pci/devices", gpu0, "class")
	m.reads("0x040300\n", "bus/pci/devices", audio0, "class")
	m.reads("flr bus\n", "bus/pci/devices", gpu0, "reset_method")
	m.reads("1\n", "bus/pci/devices", gpu3, "sriov_numvfs")
	for _, absent := range []string{m.device(gpu2, "reset_method"), m.device(gpu2, "reset"), m.device(gpu0, "physfn")} {
		if _, err := os.Lstat(absent); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v, want none", absent, err)
		}
	}
	members, err := filepath.Glob(m.path("kernel/iommu_groups/41/devices/*"))
	if err != nil || len(members) != 3 { // the card, its audio function, the bridge above
		t.Errorf("members of group 41: %v, %v", members, err)
	}
	for link, want := range map[string]string{
		m.device(gpu1, "iommu_group"):                  m.path("kernel/iommu_groups/41"),
		m.path("module/vfio_pci/drivers/pci:vfio-pci"): m.path("bus/pci/drivers/vfio-pci"),
	} {
		if target, err := filepath.EvalSymlinks(link); err != nil || target != want {
			t.Errorf("%s leads to %s, %v, want %s", link, target, err, want)
		}
	}
	if m.nodes() != "iommu vfio/vfio" {
		t.Errorf("device nodes at boot: %s", m.nodes())
	}
}

func TestFunctionsBoundToVFIOAtBoot(t *testing.T) {
	m := boot(t, "vfio-awkward", nil, map[string]string{gpu1: "vfio-pci", audio1: "vfio-pci"})
	m.has(gpu1, "vfio-pci")
	m.has(audio1, "vfio-pci")
	m.reads("vfio-pci\n", "bus/pci/devices", gpu1, "driver_override")
	if m.state.GPU(1).Attached() || m.state.GPU(2).Minor != 1 {
		t.Errorf("attached: %v; minor of the next GPU: %d", m.state.GPU(1).Attached(), m.state.GPU(2).Minor)
	}
	m.eventually("the device nodes", func() bool {
		return m.nodes() == "iommu vfio/41 vfio/vfio vfio/devices/vfio0 vfio/devices/vfio1"
	})
	m.hand(gpu1, "vfio-pci", "")
	m.has(gpu1, "nvidia")
}

func TestHandingAGPUToVFIOAndBack(t *testing.T) {
	m := boot(t, "h100-passthrough", nil)
	before := m.nodes()
	const gpu = "0000:43:00.0"
	m.hand(gpu, "nvidia", "vfio-pci")
	m.has(gpu, "vfio-pci")
	if got, want := m.nodes(), before+" vfio/11 vfio/devices/vfio0"; !sameWords(got, want) {
		t.Errorf("device nodes: %s, want %s", got, want)
	}
	if m.state.GPU(1).Attached() {
		t.Error("the state file says that NVIDIA's driver has the GPU")
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(m.config.SysPath()), "proc/driver/nvidia/gpus", gpu)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("/proc of the driver lists the GPU: %v", err)
	}
	number := strings.TrimSpace(m.read("bus/pci/devices", gpu, "vfio-dev/vfio0/dev"))
	var info unix.Stat_t
	if err := unix.Stat(filepath.Join(m.dev, "vfio/devices/vfio0"), &info); err != nil {
		t.Fatal(err)
	}
	if node := fmt.Sprintf("%d:%d", unix.Major(info.Rdev), unix.Minor(info.Rdev)); node != number {
		t.Errorf("device node has number %s, sysfs says %s", node, number)
	}

	m.hand(gpu, "vfio-pci", "")
	m.has(gpu, "nvidia")
	m.reads("(null)\n", "bus/pci/devices", gpu, "driver_override")
	if m.nodes() != before || !m.state.GPU(1).Attached() || m.state.GPU(1).PersistenceMode != 0 {
		t.Errorf("afterwards: nodes %q, attached %v, persistence %d", m.nodes(), m.state.GPU(1).Attached(), m.state.GPU(1).PersistenceMode)
	}
	m.hand(gpu, "nvidia", "vfio-pci")
	if _, err := os.Stat(m.device(gpu, "vfio-dev/vfio1")); err != nil {
		t.Errorf("the second bind gives the function's device node the same number: %v", err)
	}
}

func sameWords(a, b string) bool {
	seen := map[string]int{}
	for _, word := range strings.Fields(a) {
		seen[word]++
	}
	for _, word := range strings.Fields(b) {
		seen[word]--
	}
	for _, n := range seen {
		if n != 0 {
			return false
		}
	}
	return true
}

func TestMinorOfAReturnedGPUIsTheLowestFreeOne(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	m.hand(gpu0, "nvidia", "vfio-pci")
	m.hand(gpu2, "nvidia", "vfio-pci")
	m.hand(gpu2, "vfio-pci", "")
	m.hand(gpu0, "vfio-pci", "")
	if first, third := m.state.GPU(0).Minor, m.state.GPU(2).Minor; first != 2 || third != 0 {
		t.Errorf("minors are %d and %d, want 2 and 0", first, third)
	}
	information, err := os.ReadFile(filepath.Join(filepath.Dir(m.config.SysPath()), "proc/driver/nvidia/gpus", gpu2, "information"))
	if err != nil || !strings.Contains(string(information), "Device Minor: \t 0\n") {
		t.Errorf("information: %s, %v", information, err)
	}
}

// The inode of the link tells the plugin that a GPU was bound again.
func TestLinkToDriverIsAnotherAfterEachBinding(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	inode := func() uint64 {
		info, err := os.Lstat(filepath.Join(m.config.SysPath(), "bus/pci/devices", gpu0, "driver"))
		if err != nil {
			t.Fatal(err)
		}
		return info.Sys().(*syscall.Stat_t).Ino
	}
	seen := []uint64{inode()}
	if again := inode(); again != seen[0] {
		t.Errorf("without a change the inodes are %d and %d", seen[0], again)
	}
	for _, drivers := range [][2]string{{"nvidia", "vfio-pci"}, {"vfio-pci", ""}, {"nvidia", "vfio-pci"}} {
		m.hand(gpu0, drivers[0], drivers[1])
		if now := inode(); slices.Contains(seen, now) {
			t.Errorf("from %q to %q: inode %d was there before", drivers[0], drivers[1], now)
		} else {
			seen = append(seen, now)
		}
	}
}

func TestWrongWritesFailAsInTheKernel(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	m.fails(syscall.ENODEV, gpu0, "bus/pci/drivers/vfio-pci/unbind") // nvidia has it
	m.fails(syscall.ENODEV, "0000:99:00.0", "bus/pci/drivers/nvidia/unbind")
	m.fails(syscall.ENODEV, gpu0+" ", "bus/pci/drivers/nvidia/unbind")
	m.fails(syscall.ENODEV, gpu0, "bus/pci/drivers/vfio-pci/bind") // no override
	m.fails(syscall.EBUSY, gpu0, "bus/pci/drivers/nvidia/bind")    // it has the driver
	m.fails(syscall.ENODEV, "0000:99:00.0", "bus/pci/drivers_probe")
	m.fails(syscall.EINVAL, "10de", "bus/pci/drivers/vfio-pci/new_id")
	m.fails(syscall.ENODEV, "10de 1", "bus/pci/drivers/vfio-pci/remove_id")
	m.fails(syscall.EINVAL, strings.Repeat("x", pageSize-1), "bus/pci/devices", gpu0, "driver_override")
	m.fails(syscall.EINVAL, "2", "bus/pci/devices", gpu0, "reset")
	m.fails(syscall.EACCES, "1", "bus/pci/devices", gpu0, "vendor")
	m.fails(syscall.EACCES, "1", "bus/pci/devices", gpu0, "no_such_file")
	if _, err := os.ReadFile(m.path("bus/pci/drivers_probe")); !errors.Is(err, syscall.EACCES) {
		t.Errorf("read of a file without read permission: %v", err)
	}
	m.has(gpu0, "nvidia")
}

func TestProbeSucceedsWithoutBinding(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	m.hand(gpu0, "nvidia", "no-such-driver")
	m.has(gpu0, "")
	m.probe(audio0) // bound already
	m.has(audio0, "snd_hda_intel")
}

func TestWithoutIOMMUNothingBindsToVFIO(t *testing.T) {
	bare := func(o *layout.Options) {
		o.Config.Node.VFIO.NoIOMMU = true
		o.Config.Node.GPUs[0].IOMMUGroup = nil
	}
	m := boot(t, "vfio-awkward", bare)
	m.hand(gpu0, "nvidia", "vfio-pci")
	m.has(gpu0, "")
	m.fails(syscall.EINVAL, gpu0, "bus/pci/drivers/vfio-pci/bind")
}

func TestUnsafeNoIOMMU(t *testing.T) {
	m := boot(t, "vfio-awkward", func(o *layout.Options) {
		o.Config.Node.VFIO.UnsafeNoIOMMU = true
		o.Config.Node.VFIO.NodeDelay.Duration = 0
		o.Config.Node.GPUs[0].IOMMUGroup = nil
	})
	m.hand(gpu0, "nvidia", "vfio-pci")
	m.reads("vfio-noiommu\n", "bus/pci/devices", gpu0, "iommu_group/name")
	m.reads("Y\n", "module/vfio/parameters/enable_unsafe_noiommu_mode")
	if !strings.Contains(m.nodes(), "vfio/noiommu-0") {
		t.Errorf("device nodes: %s", m.nodes())
	}
}

func TestNewIDTakesUnboundFunctions(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	m.must("10de 22ba", "bus/pci/drivers/vfio-pci/new_id")
	m.has(audio0, "snd_hda_intel")
	m.has(audio1, "vfio-pci")
	m.fails(syscall.EEXIST, "10de 22ba", "bus/pci/drivers/vfio-pci/new_id")
	m.must("10de 22ba", "bus/pci/drivers/vfio-pci/remove_id")
	m.has(audio1, "vfio-pci")
}

func TestGroupOfTwoHasOneNode(t *testing.T) {
	m := boot(t, "vfio-awkward", func(o *layout.Options) { o.Config.Node.VFIO.NodeDelay.Duration = 0 })
	m.hand(audio0, "snd_hda_intel", "vfio-pci")
	m.hand(gpu0, "nvidia", "vfio-pci")
	m.hand(gpu0, "vfio-pci", "")
	if !strings.Contains(m.nodes(), "vfio/40") {
		t.Errorf("the group's node is gone while one function is bound: %s", m.nodes())
	}
	m.hand(audio0, "vfio-pci", "")
	if strings.Contains(m.nodes(), "vfio/40") {
		t.Errorf("the group's node stays without a bound function: %s", m.nodes())
	}
	m.has(audio0, "snd_hda_intel")
}

func TestLateNodes(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	m.hand(gpu0, "nvidia", "vfio-pci")
	if strings.Contains(m.nodes(), "vfio/40") {
		t.Error("the group's node is not late")
	}
	m.eventually("the group's node", func() bool { return strings.Contains(m.nodes(), "vfio/40") })
}

func TestLateGroupNodeBelongsToTheGroup(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	m.hand(gpu0, "nvidia", "vfio-pci")
	m.hand(audio0, "snd_hda_intel", "vfio-pci")
	m.hand(gpu0, "vfio-pci", "")
	m.eventually("the group's node", func() bool { return strings.Contains(m.nodes(), "vfio/40") })
}

func TestDriverReloadLeavesVFIOAlone(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	m.hand(gpu0, "nvidia", "vfio-pci")
	m.override(gpu1, "vfio-pci") // bound to nvidia until the next unbind
	if err := m.config.DriverAway(m.state, false, true); err != nil {
		t.Fatal(err)
	}
	for _, gone := range []string{"module/nvidia", "bus/pci/drivers/nvidia"} {
		if _, err := os.Stat(m.path(gone)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s without driver: %v", gone, err)
		}
	}
	if err := m.config.DriverBack(m.state, "", ""); err != nil {
		t.Fatal(err)
	}
	m.has(gpu0, "vfio-pci")
	m.has(gpu1, "")
	m.has(gpu2, "nvidia")
}

func TestNodeWithoutNVIDIADriver(t *testing.T) {
	m := boot(t, "vfio-awkward", func(o *layout.Options) { o.NoDriver = true })
	m.has(gpu0, "")
	m.override(gpu0, "vfio-pci")
	m.probe(gpu0)
	m.has(gpu0, "vfio-pci")
	m.hand(gpu0, "vfio-pci", "")
	m.has(gpu0, "")
	if nodes, _ := filepath.Glob(filepath.Join(m.dev, "nvidia*")); len(nodes) > 0 {
		t.Errorf("device nodes of NVIDIA's driver: %v", nodes)
	}
}

func TestUnloadedModule(t *testing.T) {
	m := boot(t, "vfio-awkward", func(o *layout.Options) { o.Config.Node.VFIO.Module = model.VFIOUnloaded })
	m.hand(gpu0, "nvidia", "vfio-pci")
	m.has(gpu0, "")
	if m.nodes() != "" {
		t.Errorf("device nodes without the module: %s", m.nodes())
	}
	if err := m.state.SetVFIO(true); err != nil {
		t.Fatal(err)
	}
	m.eventually("the loaded driver takes the functions that its name overrides", func() bool { return m.driver(gpu0) == "vfio-pci" })
	for range 2 {
		if err := m.state.SetVFIO(false); err != nil {
			t.Fatal(err)
		}
		m.eventually("the unloaded driver has no function", func() bool { return m.driver(gpu0) == "" })
		m.reads("vfio-pci\n", "bus/pci/devices", gpu0, "driver_override")
		m.fails(syscall.ENOENT, gpu0, "bus/pci/drivers/vfio-pci/bind")
		if _, err := os.Stat(m.path("module/vfio_pci")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("an unloaded module is in sysfs: %v", err)
		}
		if err := m.state.SetVFIO(true); err != nil {
			t.Fatal(err)
		}
		m.eventually("the driver that is loaded again takes them", func() bool { return m.driver(gpu0) == "vfio-pci" })
	}
}

func TestAnotherCardInTheSlotStartsAnew(t *testing.T) {
	m := boot(t, "vfio-awkward", nil)
	before, err := os.Stat(m.device(gpu0))
	if err != nil {
		t.Fatal(err)
	}
	m.hand(gpu0, "nvidia", "vfio-pci")
	if same, err := os.Stat(m.device(gpu0)); err != nil || !os.SameFile(before, same) {
		t.Errorf("another driver changes the function's folder: %v", err)
	}
	if err := m.state.Unplug(0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(m.device(gpu0)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an unplugged card: %v", err)
	}
	if err := m.state.Plug(0, "GPU-another"); err != nil {
		t.Fatal(err)
	}
	m.has(gpu0, "nvidia")
	m.reads("(null)\n", "bus/pci/devices", gpu0, "driver_override")
	if after, err := os.Stat(m.device(gpu0)); err != nil || os.SameFile(before, after) {
		t.Errorf("another card has the folder of the old one: %v", err)
	}
}

func TestModulesAliasNamesVFIODrivers(t *testing.T) {
	m := boot(t, "h100-passthrough", func(o *layout.Options) {
		o.Config.Node.VFIO.Variants = []model.VFIOVariant{
			{Driver: "nvgrace-gpu-vfio-pci", Module: "nvgrace_gpu_vfio_pci", Vendor: "0x10de", Device: "0x2342"},
		}
	})
	found, err := filepath.Glob(filepath.Join(m.config.ModulesPath(), "*", "modules.alias"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	content, err := os.ReadFile(found[0])
	want := "alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\nalias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n"
	if err != nil || !strings.HasSuffix(string(content), want) {
		t.Errorf("modules.alias: %s, %v", content, err)
	}
}
