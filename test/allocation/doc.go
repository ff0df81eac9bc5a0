// Package allocation compares the scheduler's allocator with simulated GPUs. The GPUs must always
// be able to create the devices that the allocator allocates from the plugin's slices. When the
// allocator refuses a claim, the test tries every way to create its devices, and all must fail.
//
// The plugin's own scan finds the GPUs. The test creates and destroys the devices by NVML calls to
// the simulated library, so the package itself contains no rule of the hardware.
//
// The first claim of a shared device creates the device and the last claim destroys it. The test
// adds up the capacity that the claims of a shared device hold, and compares the sum of their
// memory with the memory that the simulated library reports.
package allocation
