// Package chart holds the tests of the Helm chart that need no cluster: what helm renders for several sets of values is decoded strictly into the API's
// types and held against what the chart promises (rights, mounts, uninstall order), the chart's configuration file goes through the plugin's own
// strict decoder, and the admission policy's expressions are compiled and evaluated by the API server's own code.
//
// The tests run the helm that $HELM names, or one in PATH or in the test cluster's cache; `make test-unit` builds and names one.
package chart
