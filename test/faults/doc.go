// Package faults has one test: whatever goes wrong in any call to NVML while a claim's partitions are made or removed, afterwards hardware, records and CDI
// specs agree.
//
// It runs the transaction with all that it stands on, the real records, locks, specs and workers, on the simulated driver. Where the fault is the death of
// the plugin, the plugin is a process of its own, killed with its worker.
package faults
