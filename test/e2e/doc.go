// Package e2e tests the driver on a real Kubernetes cluster: the chart installed by helm, the image
// built from the Dockerfile, the production binary through the real go-nvml, kubelet, containerd
// and runc. Only the GPUs are simulated.
//
// A suite is a test function with its own cluster, and its subtests are the specifications. When a
// test fails, the logs of every component stay in a folder below build/e2e, which the test's output
// names.
//
// The suites need root. Tests that run nvidia-smi need the real program, and are skipped without
// it.
package e2e
