// Package vfio reads from sysfs whether a GPU can be passed to a virtual machine by the kernel's
// VFIO drivers, and which other PCI functions must go with it ([Read]). It binds these functions to
// a VFIO driver and gives them back ([Bind], [Release]). It needs no NVIDIA driver.
//
// A write that unbinds a function may hang until the function's last user has ended, and no signal
// ends it. So package nvidia/bind calls Bind and Release in child processes.
//
// VFIO hands out IOMMU groups: all functions of a group must be bound to a VFIO driver, except PCI
// bridges. See https://docs.kernel.org/driver-api/vfio.html. For the files, see
// Documentation/ABI/testing/sysfs-bus-pci in the kernel's source.
package vfio
