// Package conformance checks that an NVML library says of a GPU what the GPU's model file says.
//
// It has two halves. The reading half (read.go) compares one GPU with one model; it sees NVML through Reader, an interface
// without a single function that changes anything, and runs against real hardware as well:
//
//	go test -c -o conformance ./test/nvmlsim/conformance
//	./conformance -test.v -lib /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -models test/nvmlsim/models
//
// The other half needs the simulator: every model and node file, faults, events across processes, processes that are killed,
// a driver that goes and comes. It never runs where -lib is given.
package conformance
