// Package settings reads how an admin wants the GPUs of nodes to be offered: their partitions,
// their shares, and what health problems do. The chart's values have the same form.
//
// [Parse] reads a document from YAML. It accepts nothing that it does not know, and its errors name
// the field and its line. [Document.Compile] returns the settings in the form that the plugin uses.
package settings
