// Package state is the Go side of the file that the simulated NVML library maps: it compiles model and node files into it, and
// changes it while processes hold it.
//
// lib/state.h defines the file and the rules that keep it sound. The structs here repeat its layout; a test compares every offset
// and size with what the C compiler says. The package needs no cgo: it locks as the library does, with open-file-description
// locks, which the kernel drops when their holder dies.
//
// It promises that the file's inode stays: Create rewrites a file that is there in place.
package state
