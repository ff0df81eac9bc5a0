// Package cluster runs a real Kubernetes cluster on one Linux machine, for tests and
// demonstrations: etcd, API server, controller manager, scheduler, kubelet, containerd and runc.
// All are built from pinned Go modules, without container engine and registry.
//
// cluster.Up starts a cluster, Cluster.Down removes it.
//
// The control plane and each node live in their own machine (package internal/machine): private
// namespaces, a private disk, and a private view of everything outside. So a node cannot write to
// the host's files. A node can lose its power and boot again. Its kubelet and containerd can be
// stopped, restarted and killed.
//
// Up returns when every node is Ready with its images loaded, or with an error that names the log
// to read. Down leaves no process, link, mount, cgroup or file of the cluster, however it was
// started or killed. Several clusters with different names can run at once.
//
// It has no DNS, no kube-proxy and no way to the internet from a Pod. It does not isolate hostile
// workloads, and nodes share the host's kernel. It needs root.
package cluster
