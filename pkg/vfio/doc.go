// Package vfio reads from sysfs whether a GPU can be passed to a virtual machine by the kernel's
// VFIO drivers, and which other PCI functions must go with it. It changes nothing, and needs no
// NVIDIA driver.
//
// VFIO hands out IOMMU groups: all functions of a group must be bound to a VFIO driver, except PCI
// bridges. See https://docs.kernel.org/driver-api/vfio.html. For the files, see
// Documentation/ABI/testing/sysfs-bus-pci in the kernel's source.
package vfio
