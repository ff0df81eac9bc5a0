// Package nvidiatest has the fakes of this tree's tests: a [Host] is a directory with the files of
// a node, [NVML] a library in memory, and a [Site] a node with the simulated NVML library.
package nvidiatest
