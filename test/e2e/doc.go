// Package e2e proves the driver on a real Kubernetes cluster: the chart installed by helm, the image built from the Dockerfile, the production binary
// through the real go-nvml, kubelet, containerd and runc. Only the GPUs are simulated.
//
// A suite is one cluster and the tests that share it; it is a test function whose subtests are the specifications. Suites that break their nodes have
// a cluster of their own. When a test fails, the logs of every component are kept below build/e2e and named in the output.
//
// It needs root and, for the tests that run it, the real nvidia-smi: without it they are skipped and say so.
package e2e
