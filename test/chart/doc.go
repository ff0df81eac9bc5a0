// Package chart tests the Helm chart without a cluster. The tests render the chart with several
// sets of values and decode the objects strictly. They check rights, mounts and the order of the
// uninstall. The plugin's own decoder reads the rendered configuration file. The API server's own
// code compiles and evaluates the admission policies.
//
// The tests run the helm program in $HELM, in PATH, or in the test cluster's cache. `make
// test-unit` sets $HELM.
package chart
