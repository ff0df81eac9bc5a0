package sysfs

import (
	"fmt"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// entry is a file, a symbolic link or a folder of the tree.
type entry struct {
	mode    uint32 // with the type
	content string // of a file, or the target of a link
	// read and write are what a file with behaviour does. A file without read has content.
	read  func() (string, syscall.Errno)
	write func(call) syscall.Errno
	// children are the names in a folder.
	children []string
	// incarnation changes the inode of a folder when the device that it shows is another one, and that
	// of the link to a driver at each binding.
	incarnation uint32
}

// tree maps the paths below /sys to their entries.
type tree map[string]*entry

// add adds the entry and the folders above it.
func (t tree) add(name string, e *entry) {
	if t[name] != nil {
		return
	}
	t[name] = e
	if name == "." {
		return
	}
	parent := path.Dir(name)
	if t[parent] == nil {
		t.folder(parent, 0)
	}
	t[parent].children = append(t[parent].children, path.Base(name))
}

func (t tree) folder(name string, incarnation uint32) {
	t.add(name, &entry{mode: syscall.S_IFDIR | 0o755, incarnation: incarnation})
}

func (t tree) file(name, content string) {
	t.add(name, &entry{mode: syscall.S_IFREG | 0o444, content: content})
}

func (t tree) writable(name string, write func(call) syscall.Errno) {
	t.add(name, &entry{mode: syscall.S_IFREG | 0o200, write: write})
}

func (t tree) link(name, to string) {
	target, err := filepath.Rel(path.Dir(name), to)
	if err != nil { // both are relative paths
		panic(err)
	}
	t.add(name, &entry{mode: syscall.S_IFLNK | 0o777, content: target})
}

// draw returns the present tree. The caller has mu.
func (b *bus) draw() tree {
	t := tree{}
	for _, folder := range []string{".", "bus/pci/devices", "bus/pci/drivers", "kernel/iommu_groups", "module"} {
		t.folder(folder, 0)
	}
	t.writable("bus/pci/drivers_probe", b.driversProbe)
	t.file("bus/pci/drivers_autoprobe", "1\n")
	for _, driver := range b.drivers() {
		b.drawDriver(t, driver)
	}
	b.drawModules(t)
	for _, address := range b.order {
		if d := b.functions[address]; b.present(d) {
			b.drawFunction(t, d)
		}
	}
	for _, e := range t {
		sort.Strings(e.children)
	}
	return t
}

func (b *bus) drawDriver(t tree, driver string) {
	folder := path.Join("bus/pci/drivers", driver)
	t.writable(path.Join(folder, "bind"), func(c call) syscall.Errno { return b.bind(c, driver) })
	t.writable(path.Join(folder, "unbind"), func(c call) syscall.Errno { return b.unbind(c, driver) })
	t.writable(path.Join(folder, "new_id"), func(c call) syscall.Errno { return b.newID(c, driver) })
	t.writable(path.Join(folder, "remove_id"), func(c call) syscall.Errno { return b.removeID(c, driver) })
	module := b.moduleOf(driver)
	t.link(path.Join(folder, "module"), path.Join("module", module))
	t.link(path.Join("module", module, "drivers", "pci:"+driver), folder)
}

// moduleOf returns the name of the driver's module.
func (b *bus) moduleOf(driver string) string {
	for _, v := range b.config.VFIODrivers() {
		if v.Name == driver {
			return v.Module
		}
	}
	if strings.HasPrefix(driver, model.DriverNVIDIA) {
		return model.DriverNVIDIA
	}
	return strings.ReplaceAll(driver, "-", "_")
}

// drawModules adds what modules show in addition to their drivers. A built-in module has no
// initstate.
func (b *bus) drawModules(t tree) {
	if b.loaded() {
		t.folder("module/nvidia", atomic.LoadUint32(&b.state.Header().DriverEpoch))
		t.file("module/nvidia/initstate", "live\n")
		for name, content := range b.config.Modules(b.driverVersion()) {
			t.file(name, content)
		}
	}
	settings := b.config.Node.VFIO
	if !b.vfioLoaded() {
		return
	}
	modules := []string{"vfio", "vfio_pci_core", "vfio_iommu_type1"}
	if b.hasDevices() {
		modules = append(modules, "iommufd")
	}
	for _, v := range b.config.VFIODrivers() {
		modules = append(modules, v.Module)
	}
	for _, module := range modules {
		t.folder(path.Join("module", module), 0)
		if settings.Module != model.VFIOBuiltin {
			t.file(path.Join("module", module, "initstate"), "live\n")
		}
	}
	unsafe := "N\n"
	if settings.UnsafeNoIOMMU {
		unsafe = "Y\n"
	}
	t.file("module/vfio/parameters/enable_unsafe_noiommu_mode", unsafe)
}

func (b *bus) drawFunction(t tree, d *function) {
	folder := d.Folder()
	t.folder(folder, d.epoch)
	for name, content := range d.Attributes() {
		t.file(path.Join(folder, name), content)
	}
	t.add(path.Join(folder, "driver_override"), &entry{
		mode:  syscall.S_IFREG | 0o644,
		read:  func() (string, syscall.Errno) { return b.override(d) },
		write: func(c call) syscall.Errno { return b.setOverride(c, d) },
	})
	if d.ResetMethod != "" {
		t.writable(path.Join(folder, "reset"), func(c call) syscall.Errno { return b.reset(c, d) })
	}
	t.link(path.Join("bus/pci/devices", d.Address), folder)
	t.link(path.Join(folder, "subsystem"), "bus/pci")
	if driver := b.driverOf(d); driver != "" && !d.leaving {
		link := path.Join(folder, "driver")
		t.link(link, path.Join("bus/pci/drivers", driver))
		t[link].incarnation = b.bindings(d)
		t.link(path.Join("bus/pci/drivers", driver, d.Address), folder)
	}
	if b.driverOf(d) == model.DriverNVIDIA && !d.leaving {
		for name, number := range d.DRM() {
			t.file(path.Join(folder, name), number)
		}
	}
	if d.vfio != nil && b.hasDevices() && !d.vfio.withoutIOMMU && !d.leaving {
		own := path.Join(folder, "vfio-dev", fmt.Sprintf("vfio%d", d.vfio.number))
		t.file(path.Join(own, "dev"), fmt.Sprintf("%d:%d\n", d.vfio.id.Major, d.vfio.id.Minor))
	}
	b.drawGroup(t, d)
}

// bindings returns a number that grows with each binding of the function.
func (b *bus) bindings(d *function) uint32 {
	return atomic.LoadUint32(&b.state.Header().DriverEpoch) + d.epoch + d.bindings
}

func (b *bus) drawGroup(t tree, d *function) {
	var group string
	switch {
	case d.IOMMUGroup != nil:
		group = fmt.Sprintf("kernel/iommu_groups/%d", *d.IOMMUGroup)
		t.file(path.Join(group, "type"), "DMA-FQ\n")
	case d.vfio != nil: // VFIO made the group, because of its unsafe parameter
		group = fmt.Sprintf("kernel/iommu_groups/%s", strings.TrimPrefix(d.vfio.group.name, "vfio/noiommu-"))
		t.file(path.Join(group, "name"), "vfio-noiommu\n")
	default:
		return
	}
	folder := d.Folder()
	t.link(path.Join(folder, "iommu_group"), group)
	t.link(path.Join(group, "devices", d.Address), folder)
}

// stamp is what the tree depends on. Other processes change the state file's part.
type stamp struct {
	version      uint64
	loaded, vfio bool
	driver       uint32
	gpus         [maxGPUs]gpuStamp
}

type gpuStamp struct {
	present, epoch uint32
	binding        uint64
}

// maxGPUs is the number of GPUs of a node whose changes the file system follows.
const maxGPUs = 16

func (b *bus) stamp() stamp {
	s := stamp{
		version: b.version, loaded: b.loaded(), vfio: b.vfioLoaded(), driver: atomic.LoadUint32(&b.state.Header().DriverEpoch),
	}
	for i := range min(b.state.GPUCount(), maxGPUs) {
		g := b.state.GPU(i)
		s.gpus[i] = gpuStamp{atomic.LoadUint32(&g.Present), atomic.LoadUint32(&g.Epoch), atomic.LoadUint64(&g.Binding)}
	}
	return s
}
