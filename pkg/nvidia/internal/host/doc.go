// Package host reads the host's files about the NVIDIA driver and its GPUs: sysfs, /proc, /dev and
// the driver root. It also creates the device nodes of MIG capabilities, which the kernel does not
// create. It needs no C library.
package host
