// Package publish decides what a node publishes: in which shapes each GPU is offered.
// The publisher, its leader election and the taints will move here from package driver.
package publish
