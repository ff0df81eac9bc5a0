// Package config is the one definition of everything that users can configure.
//
// [Config.Fields] is a table: each row has a name, a default and a description. The row driver-root
// defines the command line flag (--driver-root), the environment variable (GPU_DRA_DRIVER_ROOT),
// the key of the YAML file (driverRoot) and the row of the reference page. So these four cannot
// drift apart.
//
// [Load] starts from the defaults and applies the file, then the environment, then the flags. The
// last one that has a value wins. Each of these sources is strict: an error names an unknown key, a
// key that occurs twice, or an invalid value. [Config.Validate] then checks the whole result.
//
// The package uses no hardware and creates no directory.
package config
