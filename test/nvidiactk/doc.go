// Package nvidiactk compares the CDI specs of the plugin with those of `nvidia-ctk cdi generate`,
// edit by edit, on simulated hosts: each driver root of test/driverzoo with node files of
// test/nvmlsim. The plugin's command inventory runs as in its container, nvidia-ctk as on the host.
//
// Every difference has an entry in a table that says why. The table is also a section of
// docs/cdi.md. A difference without an entry fails the test, and so does an entry without a
// difference.
package nvidiactk
