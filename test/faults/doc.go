// Package faults has one test: whatever goes wrong in any call to NVML while a claim's partitions are made or removed, after a restart of the plugin the
// hardware, the records, the CDI specs, the slices and what claims say of their devices agree, and everything can be done again.
//
// Where something goes wrong runs the transaction with all that it stands on, the real records, locks, specs and workers, on the simulated driver. Where
// the fault is the death of the plugin, the plugin is a process of its own, killed with its worker. What is started after that is the whole plugin,
// before an API server in memory.
package faults
