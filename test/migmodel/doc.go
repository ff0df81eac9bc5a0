// Package migmodel is the one model of MIG hardware in memory, for tests that need no NVML library.
//
// A [GPU] has the profiles and limits of a GPU model file. It follows the driver's rules: which
// placements exist, which GPU instances fit together, what is refused while something is in use,
// and which IDs are reused. [Partitions] gives the production code access to such GPUs, as package
// cut gives it to real ones.
//
// A test of package cut runs the same operations on this model and on the simulated NVML library,
// so that both agree. The rule which GPU instances fit together is in package model, and the
// conformance tests try it for every set of GPU instances.
package migmodel
