// Package state is the Go side of the state file, which the simulated NVML library maps too. It
// compiles model files and a node file into the state file, and changes the state file while
// processes use it.
//
// lib/state.h defines the file's format and rules. The structs here have the same layout as those
// of lib/state.h, and a test compares every offset and size with the C compiler's. The package
// needs no cgo. Like the library, it takes open-file-description locks, which the kernel drops when
// a process dies.
//
// The file's inode never changes, because containers bind-mount it. Create rewrites an existing
// file in place.
package state
