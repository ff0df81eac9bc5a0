// Package explain explains the state of one Pod or claim: the reasons why it waits, or its devices.
//
// The verdict is always that of the scheduler's own allocator, which runs here over the objects of
// a [fleet.Snapshot]. The allocator only answers yes or no. The package finds the reasons itself.
// It examines each device: its selectors, the claims on it, its free counters and its taints.
//
// A remedy is a set of changes for one node. The package applies the changes and runs the allocator
// again. It reports a remedy only if the claims then fit, and if they do not fit without each
// single change. All sentences are in words.go.
package explain
