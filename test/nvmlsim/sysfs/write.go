package sysfs

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// call is a write to a file of sysfs. pid is the process or thread that writes.
type call struct {
	pid  int
	text string
}

// strike does a write under the faults that a test injected for it. d is nil if the write names no
// function.
func (b *bus) strike(c call, name string, d *function, do func() syscall.Errno) syscall.Errno {
	names, gpu := []string{name}, state.AnyGPU
	if d != nil {
		names, gpu = append(names, name+"@"+d.Address), d.GPU
	}
	if errno, goes := b.fault(c, gpu, false, names); !goes {
		return errno
	}
	if errno := do(); errno != 0 {
		return errno
	}
	errno, _ := b.fault(c, gpu, true, names)
	return errno
}

// fault applies the faults before or after the write's effect. goes is false if the write ends.
func (b *bus) fault(c call, gpu int, after bool, names []string) (errno syscall.Errno, goes bool) {
	err := b.state.Strike(b.stop, c.pid, gpu, after, names...)
	var failed *state.FaultError
	switch {
	case err == nil:
		return 0, true
	case errors.Is(err, state.ErrIgnored):
		return 0, false
	case errors.As(err, &failed):
		return syscall.Errno(failed.Code), false
	default: // the writer is dead
		return syscall.EINTR, false
	}
}

// withLock calls do with the function's lock.
func (b *bus) withLock(d *function, do func() syscall.Errno) syscall.Errno {
	if errno := b.acquire(d); errno != 0 {
		return errno
	}
	defer b.release(d)
	return do()
}

// lookup is find with mu.
func (b *bus) lookup(text string) (d *function, driver string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if d = b.find(text); d != nil {
		driver = b.driverOf(d)
	}
	return d, driver
}

// unbind is a write to a driver's file unbind.
func (b *bus) unbind(c call, driver string) syscall.Errno {
	d, has := b.lookup(c.text)
	if d == nil || has != driver {
		return syscall.ENODEV
	}
	return b.withLock(d, func() syscall.Errno {
		return b.strike(c, state.SysfsUnbind, d, func() syscall.Errno {
			if _, has := b.lookup(d.Address); has == driver { // it may have changed during the wait
				b.remove(d)
			}
			return 0
		})
	})
}

// bind is a write to a driver's file bind.
func (b *bus) bind(c call, driver string) syscall.Errno {
	d, _ := b.lookup(c.text)
	if d == nil || !b.wants(driver, d) {
		return syscall.ENODEV
	}
	return b.withLock(d, func() syscall.Errno {
		return b.strike(c, state.SysfsBind, d, func() syscall.Errno {
			if _, has := b.lookup(d.Address); has != "" {
				return syscall.EBUSY
			}
			return b.probe(d, driver)
		})
	})
}

func (b *bus) wants(driver string, d *function) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Contains(b.drivers(), driver) && b.matches(driver, d)
}

// driversProbe is a write to drivers_probe. It succeeds even if no driver takes the function, and
// does not wait for the lock of a function that has a driver.
func (b *bus) driversProbe(c call) syscall.Errno {
	d, has := b.lookup(c.text)
	if d == nil {
		return syscall.ENODEV
	}
	if has != "" {
		return b.strike(c, state.SysfsProbe, d, func() syscall.Errno { return 0 })
	}
	return b.withLock(d, func() syscall.Errno {
		return b.strike(c, state.SysfsProbe, d, func() syscall.Errno {
			b.attach(d)
			return 0
		})
	})
}

// attach offers a function without driver to the drivers, until one takes it. The caller has the
// function's lock.
func (b *bus) attach(d *function) {
	if _, has := b.lookup(d.Address); has != "" {
		return
	}
	b.mu.Lock()
	drivers := b.drivers()
	b.mu.Unlock()
	for _, driver := range drivers {
		if b.wants(driver, d) && b.probe(d, driver) == 0 {
			return
		}
	}
}

// setOverride is a write to driver_override. An empty line removes the override.
func (b *bus) setOverride(c call, d *function) syscall.Errno {
	if len(c.text) >= pageSize-1 {
		return syscall.EINVAL
	}
	text, _, _ := strings.Cut(c.text, "\x00")
	text, _, _ = strings.Cut(text, "\n")
	return b.withLock(d, func() syscall.Errno {
		return b.strike(c, state.SysfsOverride, d, func() syscall.Errno {
			var err error
			b.locked(func() {
				d.override = text
				if d.GPU >= 0 {
					err = b.state.SetBinding(d.GPU, b.binding(d, b.driverOf(d)))
				}
			})
			return errnoOf(err)
		})
	})
}

// override returns the content of driver_override. It waits for the function's lock.
func (b *bus) override(d *function) (string, syscall.Errno) {
	text := "(null)"
	errno := b.withLock(d, func() syscall.Errno {
		b.mu.Lock()
		defer b.mu.Unlock()
		if d.override != "" {
			text = d.override
		}
		return 0
	})
	return text + "\n", errno
}

// reset is a write to a function's file reset.
func (b *bus) reset(c call, d *function) syscall.Errno {
	if strings.TrimSpace(c.text) != "1" {
		return syscall.EINVAL
	}
	return b.withLock(d, func() syscall.Errno {
		return b.strike(c, state.SysfsReset, d, func() syscall.Errno { return 0 })
	})
}

// parseID parses what is written to new_id and remove_id: vendor, device, and then optionally
// subsystem IDs, class, class mask and driver data, all in hexadecimal.
func parseID(text string) (id, bool) {
	parsed := id{vendor: anyID, device: anyID}
	var subVendor, subDevice uint32
	n, _ := fmt.Sscanf(strings.TrimSpace(text), "%x %x %x %x %x %x", &parsed.vendor, &parsed.device, &subVendor, &subDevice, &parsed.class,
		&parsed.mask)
	return parsed, n >= 2
}

// newID is a write to a driver's file new_id. The driver then takes every function with this ID
// that has no driver.
func (b *bus) newID(c call, driver string) syscall.Errno {
	parsed, ok := parseID(c.text)
	if !ok {
		return syscall.EINVAL
	}
	return b.strike(c, state.SysfsNewID, nil, func() syscall.Errno {
		known := false
		b.locked(func() {
			if known = slices.Contains(b.dynamic[driver], parsed); !known {
				b.dynamic[driver] = append(b.dynamic[driver], parsed)
			}
		})
		if known {
			return syscall.EEXIST
		}
		for _, address := range b.order {
			if d, has := b.lookup(address); d != nil && has == "" && b.wants(driver, d) {
				_ = b.withLock(d, func() syscall.Errno {
					if _, has := b.lookup(address); has == "" {
						_ = b.probe(d, driver)
					}
					return 0
				})
			}
		}
		return 0
	})
}

// removeID is a write to a driver's file remove_id. A bound function stays bound.
func (b *bus) removeID(c call, driver string) syscall.Errno {
	parsed, ok := parseID(c.text)
	if !ok {
		return syscall.EINVAL
	}
	return b.strike(c, state.SysfsRemoveID, nil, func() syscall.Errno {
		errno := syscall.ENODEV
		b.locked(func() {
			at := slices.IndexFunc(b.dynamic[driver], func(i id) bool { return i.vendor == parsed.vendor && i.device == parsed.device })
			if at >= 0 {
				b.dynamic[driver] = slices.Delete(b.dynamic[driver], at, at+1)
				errno = 0
			}
		})
		return errno
	})
}
