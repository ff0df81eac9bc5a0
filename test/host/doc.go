// Package host is a GPU node without a cluster: the files and device nodes of a machine with the simulated driver in a folder of its own, and on it the
// plugin's transaction with all that it stands on, the real records, locks, specs and workers.
//
// The test binary plays the plugin's child processes: the TestMain of a package that stands on this one ends with [Main].
package host
