// Package clusterharness assembles a cluster with simulated GPUs: the simulated driver, the nodes
// on which it is installed, the image and the chart. The demo and the end-to-end tests both use the
// package, so the demo shows what the tests check.
//
// The package only builds and describes. It owns no process and no state: the caller that creates a
// cluster also deletes it.
package clusterharness
