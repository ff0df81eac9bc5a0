// Package cdi keeps the Container Device Interface specs that give the container runtime a claim's
// devices.
//
// The CDI directory has one base spec, with the edits that every container with a GPU needs
// (libraries, control device nodes, hooks), and one small spec per claim. The kubelet gets two CDI
// device IDs for each device of a claim: that of the base spec and that of the device in the
// claim's spec. A driver upgrade then rewrites one file, which reaches containers when they
// restart.
//
// Promises: the CDI library has validated a spec before it is written. A reader sees the old file
// or the new one, never a part. An unchanged spec is not rewritten. The base spec is never without
// edits.
//
// The package interprets no edits, except that it finds the CUDA library among them. It does not
// know which claims exist. Package reconciler looks for specs that another program removed or
// changed.
package cdi
