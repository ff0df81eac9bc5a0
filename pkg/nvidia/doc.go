// Package nvidia is the driver's only access to the hardware: NVML, the NVIDIA driver's files,
// /dev, /proc and sysfs.
//
// [Scan] reads the node once and returns a [Node]: the driver's versions, the GPUs that can be
// offered, the CDI edits that containers need, and a [Problem] for every GPU left out. It opens
// NVML at the start and closes it at the end.
//
// Promises:
//   - Every path is configured by [Paths]. CDI edits have the host's paths, even where the plugin
//     sees the files under other paths. [Paths.Visible] converts a host path to the plugin's path.
//   - If the node cannot serve GPUs, Scan returns a [NotReadyError] with the reason and the remedy.
//   - A GPU that fails, hangs or lacks its device node is left out with a Problem. Scan still
//     returns the other GPUs.
//   - A container gets everything that CUDA needs: a node without /dev/nvidia-uvm is not ready,
//     even if nvidia-smi works there.
//
// NVML runs in child processes, because a call into a broken driver may never return, and a broken
// library crashes its process. A driver upgrade also needs a new process, because a process cannot
// unload the old C library. [Isolated] runs the scan in a child process, which calls [ServeScan].
//
// [Partitions] changes MIG partitions, the compute mode and the time slice. Each GPU has its own
// worker process, which calls [ServePartitions] and ends when idle. The worker does exactly what it
// is asked and knows no claims: package prepare makes sure that no partition leaks. Time slices are
// set by the driver's nvidia-smi. The worker hides all other GPUs from nvidia-smi, which fails if
// one of them is lost.
//
// [Watch] polls the GPUs' health and receives their events in a child process, which calls
// [ServeWatch]. Package health judges the results. While Watch runs, NVML is open, so no driver can
// be unloaded and no GPU can be reset. When Watch returns, NVML is closed.
//
// The package changes nothing else on the node. It keeps no state between scans: package inventory
// does.
package nvidia
