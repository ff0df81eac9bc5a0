// Package nodeharness provides a simulated GPU node for tests that need no cluster. A temporary
// folder has the files and device nodes of a machine with the simulated driver. The plugin runs
// there with real checkpoint records, locks, CDI specs and worker processes.
//
// When the plugin starts a child process, that is the test binary. So the TestMain of a package
// that uses nodeharness must end with [Main].
package nodeharness
