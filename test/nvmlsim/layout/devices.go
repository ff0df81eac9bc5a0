package layout

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// Major and minor numbers of the driver's character devices. The major majorNVIDIA is registered
// for NVIDIA; chooseMajors picks the others among majors that the kernel does not use, so that no
// device node can reach a real driver.
const (
	majorNVIDIA = 195
	minorCtl    = 255
	minorMode   = 254

	controlDevice = "nvidiactl"
)

// majors are the dynamic major numbers of the driver's character devices.
type majors struct {
	uvm, caps, imex, nvswitch, vfio, vfioDevice uint32
}

type deviceNode struct {
	name         string
	major, minor uint32
	mode         uint32
	gid          uint32
	// byOthers is true for a device node that the layout does not create and does not remove.
	byOthers bool
}

// kernelCharDevices returns the character devices that the running kernel has registered: names by
// major number.
func kernelCharDevices() (map[uint32]string, error) {
	file, err := os.Open("/proc/devices")
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	used := map[uint32]string{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "Block devices") {
			break
		}
		var major uint32
		var name string
		if n, _ := fmt.Sscanf(lines.Text(), "%d %s", &major, &name); n == 2 {
			used[major] = name
		}
	}
	return used, lines.Err()
}

// chooseMajors chooses six unused dynamic majors. It counts majors named nvidia* as unused: on a
// simulated node /proc/devices may already show the majors that an earlier call chose.
func chooseMajors() (majors, error) {
	used, err := kernelCharDevices()
	if err != nil {
		return majors{}, err
	}
	for major, name := range used {
		if strings.HasPrefix(name, "nvidia") {
			delete(used, major)
		}
	}
	var free []uint32
	for major := uint32(511); major >= 384 && len(free) < 6; major-- {
		if _, taken := used[major]; !taken {
			free = append(free, major)
		}
	}
	if len(free) < 6 {
		return majors{}, errors.New("fewer than six free device majors between 384 and 511")
	}
	return majors{uvm: free[0], caps: free[1], imex: free[2], nvswitch: free[3], vfio: free[4], vfioDevice: free[5]}, nil
}

func (c *Config) nodes(v view) ([]deviceNode, error) {
	if c.NoDevices || c.NoFiles || (c.Kind == Container && !v.loaded) {
		return nil, nil
	}
	m, err := chooseMajors()
	if err != nil {
		return nil, err
	}
	nodes := []deviceNode{
		{name: "nvidia-modeset", major: majorNVIDIA, minor: minorMode, mode: 0o666},
		{name: "nvidia-caps/nvidia-cap1", major: m.caps, minor: capConfig, mode: 0o400},
		{name: "nvidia-caps/nvidia-cap2", major: m.caps, minor: capMonitor, mode: 0o444},
	}
	if !c.NoUVM {
		nodes = append(nodes, deviceNode{name: "nvidia-uvm", major: m.uvm, mode: 0o666})
	}
	if !c.NoUVM && !c.Node.NoUVMTools {
		nodes = append(nodes, deviceNode{name: "nvidia-uvm-tools", major: m.uvm, minor: 1, mode: 0o666})
	}
	for i, card := range c.Node.GPUs {
		if !v.gpus[i].present {
			continue
		}
		for _, minor := range minorsOf(card, v.gpus[i]) {
			nodes = append(nodes, deviceNode{name: fmt.Sprintf("nvidia%d", minor), major: majorNVIDIA, minor: minor, mode: 0o666})
		}
		for _, capability := range v.gpus[i].capabilities {
			nodes = append(nodes, deviceNode{
				name: fmt.Sprintf("nvidia-caps/nvidia-cap%d", capability.minor), major: m.caps, minor: capability.minor, mode: 0o444,
				byOthers: c.Node.NoCapabilityNodes,
			})
		}
	}
	// The control device node comes last: while it is missing, the library reports that no driver is
	// loaded, so that no process sees only some of the GPUs.
	return append(nodes, deviceNode{name: controlDevice, major: majorNVIDIA, minor: minorCtl, mode: 0o666}), nil
}

// minorsOf returns the minors of the GPU's device nodes: the one that it has, and the one that it
// had at boot. Nothing removes the node of a card that another driver has now.
func minorsOf(card model.Card, gpu gpuView) []uint32 {
	var minors []uint32
	if !card.StartsAway() {
		minors = append(minors, *card.Minor)
	}
	if gpu.attached && !slices.Contains(minors, gpu.minor) {
		minors = append(minors, gpu.minor)
	}
	return minors
}

// applyDevices creates the expected device nodes and removes other device nodes that have one of
// the simulated driver's names.
func (c *Config) applyDevices(v view) error {
	nodes, err := c.nodes(v)
	if err != nil {
		return err
	}
	if len(nodes) > 0 && !c.PlainDevices {
		if err := refuseRealDriver(); err != nil {
			return err
		}
	}
	if err := c.applyNodes(c.DeviceDir(), nodes); err != nil {
		return err
	}
	if c.Kind == Container && c.Node.HostNodesInPart {
		if err := c.applyNodes(c.Dev, c.hostPart(nodes)); err != nil {
			return err
		}
	}
	return c.applyDRM(v)
}

// hostPart returns those of a driver container's device nodes that the host's /dev has too: the
// control node and the first GPU's.
func (c *Config) hostPart(nodes []deviceNode) []deviceNode {
	var part []deviceNode
	for _, node := range nodes {
		if node.name == controlDevice || node.name == fmt.Sprintf("nvidia%d", *c.Node.GPUs[0].Minor) {
			part = append(part, node)
		}
	}
	return part
}

// applyNodes creates these device nodes in the folder, and removes others of the driver's.
func (c *Config) applyNodes(folder string, nodes []deviceNode) error {
	wanted := map[string]bool{}
	for _, node := range nodes {
		wanted[node.name] = true
		if node.byOthers {
			continue
		}
		if err := c.makeNode(folder, node); err != nil {
			return err
		}
	}
	for _, name := range c.knownNames(folder) {
		if wanted[name] {
			continue
		}
		if err := removeNode(filepath.Join(folder, name)); err != nil {
			return err
		}
	}
	if len(nodes) == 0 {
		_ = os.Remove(filepath.Join(folder, "nvidia-caps")) // fails if the folder is not empty
	}
	return nil
}

// refuseRealDriver returns an error if the machine has a real NVIDIA driver, because that driver
// would answer on the simulated device nodes.
func refuseRealDriver() error {
	if _, err := os.Stat("/sys/module/nvidia"); err == nil {
		return errors.New("this machine's kernel has a real NVIDIA driver: device nodes made here would reach real GPUs; use --plain-devices")
	}
	return nil
}

func (c *Config) knownNames(folder string) []string {
	names := []string{controlDevice, "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"}
	capabilities, _ := filepath.Glob(filepath.Join(folder, "nvidia-caps", "nvidia-cap[0-9]*"))
	for _, path := range capabilities {
		names = append(names, filepath.Join("nvidia-caps", filepath.Base(path)))
	}
	for i, card := range c.Node.GPUs {
		names = append(names, fmt.Sprintf("nvidia%d", *card.Minor), fmt.Sprintf("nvidia%d", i))
	}
	return names
}

func (c *Config) makeNode(folder string, node deviceNode) error {
	path := filepath.Join(folder, node.name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if c.PlainDevices {
		return writeFile(path, "", os.FileMode(node.mode))
	}
	number := int(unix.Mkdev(node.major, node.minor))
	var have unix.Stat_t
	is := unix.Lstat(path, &have) == nil
	if is && (have.Mode&unix.S_IFMT != unix.S_IFCHR || have.Rdev != uint64(number)) {
		if err := removeNode(path); err != nil {
			return err
		}
		is = false
	}
	if !is {
		if err := unix.Mknod(path, unix.S_IFCHR|node.mode, number); err != nil {
			return fmt.Errorf("mknod %s c %d %d: %w (not allowed here? --plain-devices makes ordinary files)", path, node.major, node.minor, err)
		}
	}
	if err := errors.Join(unix.Chown(path, 0, int(node.gid)), unix.Chmod(path, node.mode)); err != nil || is {
		return err
	}
	return checkNode(path)
}

// checkNode returns an error if the device node lies on a file system mounted with nodev. There
// every open fails with EACCES, so NVML would see no GPU.
func checkNode(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err == nil {
		return unix.Close(fd)
	}
	if errors.Is(err, syscall.EACCES) {
		return fmt.Errorf("open %s: %w: is its file system mounted nodev? Use another --dev, or --plain-devices", path, err)
	}
	return nil
}

// removeNode removes a device node, or an empty regular file that replaces a device node. It
// refuses to remove anything else.
func removeNode(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&os.ModeCharDevice == 0 && (!info.Mode().IsRegular() || info.Size() > 0) {
		return fmt.Errorf("%s is not a device node and was not removed", path)
	}
	return os.Remove(path)
}
