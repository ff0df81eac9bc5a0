// Package steps has the reversible steps of which a preparation consists, such as creating a MIG
// instance or starting an MPS daemon. There is one file a kind of step, and registry.go lists the
// kinds.
//
// Each step has an Apply and an idempotent Revert. It is stored in the claim's record
// before it runs, and has its results there after it ran. A [Shared] step wraps a [Sharable] one
// for several claims. A holder file has their common state.
//
// A step works on one [Env]: the claim, the node's stores, and the hardware through [Partitions]
// and [Daemons]. The caller holds the locks of the claim and of its GPUs.
//
// To add a kind of step, write its file, list it in registry.go, and let the plan in package
// prepare decide when a claim needs it. A setting of a GPU is a [Setting], as that of
// [NewTimeSlice] is, and its calls are methods of Partitions, in package cut. An earlier version
// leaves a record alone that has a kind it does not know, with its devices taken.
package steps
