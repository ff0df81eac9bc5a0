// Package exclusion keeps GPUs out of the health watch while their MIG mode changes, and while they
// leave NVIDIA's driver or come back to it.
//
// Package cut excludes a GPU before the change and waits until it is watched again. Package watch
// registers its processes with the GPUs that each may have open, and replaces a process that has an
// excluded GPU open. The package knows no hardware and starts no process.
package exclusion
