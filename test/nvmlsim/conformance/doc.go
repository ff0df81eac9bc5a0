// Package conformance checks that an NVML library agrees with a GPU's model file.
//
// It has two halves. The reading half (read.go) compares one GPU with one model. It uses NVML
// through Reader, an interface without functions that change anything, and also runs on real
// hardware:
//
// go test -c -o conformance ./test/nvmlsim/conformance && ./conformance -test.v -lib
// /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -models test/nvmlsim/models
//
// The other half needs the simulator. It tests every model and node file, injected faults, events
// across processes, killed processes and driver reloads. It never runs with -lib.
package conformance
