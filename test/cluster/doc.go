// Package cluster runs a real Kubernetes cluster on one Linux machine, for tests and demonstrations: etcd, API server, controller manager,
// scheduler, kubelet, containerd and runc, all built from pinned Go modules, with no container engine and no registry.
//
//	cluster, err := cluster.Up(ctx, cluster.Options{Name: "e2e", Nodes: []cluster.NodeOptions{{}, {}}, Output: os.Stderr})
//	…
//	defer cluster.Down(ctx)
//
// The control plane and each node live in a machine of their own (package internal/machine): private namespaces, a private disk, and a
// private view of everything outside it, so that what runs on a node cannot write to the host's files. A node can lose its power and boot
// again, and its kubelet and containerd can be stopped, restarted and killed.
//
// What the package promises: Up returns when every node is Ready with its images loaded, or with an error that names the log to read. Down
// leaves no process, link, mount, cgroup or file of the cluster, no matter how it came up or what of it was killed before. Several clusters
// with different names run beside each other.
//
// What it does not do: there is no DNS, no kube-proxy and no way to the internet from a Pod, no isolation against hostile workloads, and no
// kernel of a node's own. It needs root.
package cluster
