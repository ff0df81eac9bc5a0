// Package faults injects a fault into every NVML call that prepares or unprepares partitions. After
// a restart of the plugin, the hardware, the checkpoint records, the CDI specs, the slices and the
// claims' device statuses must agree, and Prepare and Unprepare must work again.
//
// The code that meets the fault is the plugin's real code for Prepare and Unprepare, with real
// checkpoint records, locks, CDI specs and worker processes, on the simulated NVIDIA driver. If the
// fault kills the plugin, this code runs in a process of its own, which is killed with its worker.
// After the restart the whole plugin runs, with an API server in memory.
package faults
