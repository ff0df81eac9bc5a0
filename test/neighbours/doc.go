// Package neighbours computes what other components of a cluster derive from the driver's slices:
// the Cluster Autoscaler's utilization, Kueue's quota, and what a scheduler without partitionable
// devices allocates. Each test names the source of the component's rule. No code is copied.
package neighbours
