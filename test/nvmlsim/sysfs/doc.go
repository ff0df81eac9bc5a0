// Package sysfs serves a sysfs in which a simulated GPU can be unbound from NVIDIA's driver and
// bound to vfio-pci, as a file system in user space (FUSE). It covers the PCI bus, the IOMMU
// groups, the modules of the drivers, and the device nodes of VFIO.
//
// The bus answers as the kernel's driver core does:
//
//   - A write of an unknown or wrong function fails with ENODEV. drivers_probe succeeds even if no
//     driver takes the function.
//   - A function has a lock, which each write about it holds, and reading driver_override takes.
//   - NVIDIA's driver lets go of a GPU only when no process has it or its DRM devices open. Until
//     then the write hangs, the links are gone, and no signal ends the writer. NVML no longer lists
//     the GPU, before driver 595.44.02 only afterwards.
//   - vfio-pci lets go only when no process has one of the function's device nodes open.
//
// The state file of the simulated NVML says which GPUs NVIDIA's driver has. So NVML, the layout's
// files and this package agree. Everything else is in the server's memory and new at each boot.
//
// The package does not check that an IOMMU group is viable, and moves no data.
package sysfs
