// Package fleet reads a [Snapshot] of a cluster's API objects that affect GPUs. It is read once,
// from an API server ([Read]) or an archive ([ReadArchive]). Afterwards it never changes.
//
// The package only reads. It never asks for Secrets, and it drops environment variables, volumes
// and images of Pods as soon as it has read them. [Snapshot.Missing] lists the objects that the
// user may not read, so that each answer can mention them.
package fleet
