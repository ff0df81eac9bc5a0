// Package publish decides how a node offers each of its GPUs: whole, in partitions or in shares.
//
// Layouts applies the MIG policies. It also keeps every allocated device published, with the
// counters that it consumed when it was allocated, until its claim ends.
//
// The publisher, its leader election and the taints are in package driver.
package publish
