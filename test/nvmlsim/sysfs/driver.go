package sysfs

import (
	"log"
	"syscall"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// checkAgain is how often a driver that waits for its users checks whether they have gone. NVIDIA's
// driver checks every 500 ms.
const checkAgain = 20 * time.Millisecond

// probe lets the driver take the function. The caller has the function's lock, and no driver has
// the function.
func (b *bus) probe(d *function, driver string) syscall.Errno {
	b.locked(func() { d.bindings++ })
	switch {
	case b.isVFIO(driver):
		return b.bindVFIO(d, driver)
	case driver == model.DriverNVIDIA && d.GPU >= 0:
		var err error
		b.locked(func() { err = b.state.Bind(d.GPU, b.binding(d, driver)) })
		if err != nil {
			return syscall.EIO
		}
		b.applyBinding()
		return 0
	default:
		b.locked(func() { d.driver = driver })
		return 0
	}
}

// remove takes the function from its driver, and waits until the driver lets go. The caller has the
// function's lock.
func (b *bus) remove(d *function) {
	switch driver := b.driverOf(d); {
	case driver == model.DriverNVIDIA && d.GPU >= 0:
		b.removeNVIDIA(d)
	case d.vfio != nil:
		b.unbindVFIO(d)
	default:
		b.locked(func() { d.driver = "" })
	}
}

// unlinksFirst is the first version of NVIDIA's driver that takes a GPU from its list before it
// waits for the GPU's users. With letsGoOfModeset and later, nvidia_drm closes the GPU then.
var (
	unlinksFirst    = [3]int{595, 44, 2}
	letsGoOfModeset = [3]int{580, 105, 8}
)

// removeNVIDIA does what nv_pci_remove_helper of NVIDIA's driver does. It takes the GPU from the
// driver's list, and waits without end for the processes that have it or its DRM devices open.
func (b *bus) removeNVIDIA(d *function) {
	unlink := func() {
		if err := b.state.SetBinding(d.GPU, b.binding(d, "")); err != nil {
			log.Printf("unbind %s: %v", d.Address, err)
		}
	}
	late := b.driverBefore(unlinksFirst)
	b.locked(func() {
		d.driver, d.leaving = model.DriverNVIDIA, true
		if !late {
			unlink()
		}
	})
	keeps := b.config.Node.DRMNodes && b.config.Node.DRMModeset && b.driverBefore(letsGoOfModeset)
	if !b.await(func() bool { return !keeps && !b.state.Opened(d.GPU) && !b.opened(d.DRMNumbers()) }) {
		return
	}
	b.locked(func() {
		if late {
			unlink()
		}
		d.driver, d.leaving = "", false
	})
	b.applyBinding()
}

// await waits until done. It returns false if the file system ends before.
func (b *bus) await(done func() bool) bool {
	ticker := time.NewTicker(checkAgain)
	defer ticker.Stop()
	for !done() {
		select {
		case <-ticker.C:
		case <-b.stop:
			return false
		}
	}
	return true
}

// applyBinding updates the files of NVIDIA's driver in /proc and its device nodes.
func (b *bus) applyBinding() {
	if err := b.config.ApplyBinding(b.state); err != nil {
		log.Printf("update the files of the driver: %v", err)
	}
}
