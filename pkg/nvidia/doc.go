// Package nvidia has the words that its rooms and their users share: where the host's files are
// ([Paths]), what a scan finds ([Node], [GPU], [Problem]), and the errors that callers decide on.
// It needs no C library.
//
// The rooms below it are the driver's only access to the hardware:
//
//   - scan reads the node's GPUs.
//   - cut changes them: MIG partitions, compute mode, time slice, persistence mode.
//   - bind moves them between NVIDIA's driver and VFIO, for virtual machines.
//   - watch polls their health and receives their events.
//
// Each room works in child processes of its own, because a call into a broken driver may never
// return, and a broken library crashes its process. A driver upgrade also needs a new process,
// because a process cannot unload the old C library. A child ends with the plugin, unless it hangs
// in the kernel. Only bind does not use NVML.
//
// Every path is configured by [Paths]. CDI edits have the host's paths, even where the plugin sees
// the files under other paths. [Paths.Mapper] converts host paths to the plugin's path.
package nvidia
