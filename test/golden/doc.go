// Package golden compares the driver's output with files below testdata: the ResourceSlices of
// every GPU model under every MIG policy, the CDI specs and answers for a fixed set of claims, and
// the objects that the chart renders. A test fails if the output changes. After an intended change,
// `make golden` writes the files again, and a reviewer reads their diff.
//
// The hardware is the simulated NVML library on a simulated host in a folder. Model files, node
// name, UUID seed and driver version are fixed, so that two runs give the same bytes.
package golden
