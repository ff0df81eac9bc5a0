// Package cdi keeps the Container Device Interface specs through which the container runtime learns what a claim's devices are.
//
// There are two kinds of files in the CDI directory: one base spec, whose spec-level edits are what every container with a GPU needs (libraries,
// control nodes, hooks), and one small spec per claim. A claim's device is answered to the kubelet as two CDI device IDs, the base's and its own:
// a driver upgrade then rewrites one file, and reaches containers when they restart.
//
// What the package promises: a spec is valid for the CDI library before it is written; a reader sees the old file or the new one and never a
// part; an unchanged spec is not written again; [Store.Watch] notices within a second when someone else removes or alters a file of ours.
//
// It does not know what is in the edits, and it keeps no record of claims: a spec that is lost is made again by its owner.
package cdi
