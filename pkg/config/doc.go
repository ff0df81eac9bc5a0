// Package config is the one definition of everything that can be configured.
//
// [Config.Fields] is a table: each row has a name, a default and a sentence. From it come the command line flag (--driver-root), the environment
// variable (GPU_DRA_DRIVER_ROOT), the key of the YAML file (driverRoot) and the row of the reference page, so that they cannot drift apart.
//
// [Load] is a pipeline: defaults, then the file, then the environment, then flags; the later wins. Each stage is strict (an unknown key, a key given
// twice or a value that does not parse is an error that names it), and one [Config.Validate] at the end looks at the result as a whole.
// The package touches no hardware and makes no directory.
package config
