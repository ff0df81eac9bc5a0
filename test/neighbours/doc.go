// Package neighbours computes what other components of a cluster read from our slices: the Cluster
// Autoscaler's utilization, Kueue's quota, and what a scheduler without partitionable devices
// allocates. Each test names the source of the rule that it follows. The code is our own.
package neighbours
