// Package containers starts real containers with the CDI specs that the plugin writes, in the ways
// in which Kubernetes may start them: with runc and crun, in a user namespace, with a read-only
// root file system, without privileges. The root file system has Debian's C library and loader.
//
// The node and its driver are simulated, see package nodeharness. Further hosts have a driver root
// of test/driverzoo and the GPUs of a node of test/nvmlsim, see package hostharness. runc is the
// test cluster's, and crun is Debian's package.
package containers
