// Package settings reads how an admin wants the GPUs of nodes to be offered: their partitions,
// their shares, and what health problems do. The chart's values have the same form.
//
// [Parse] reads a document from YAML. It accepts nothing that it does not know, and its errors name
// the field and its line. A document has values for all nodes, and named configurations with other
// values for some. [Document.Choose] says which one a Node has, and [Document.Compile] returns it
// in the form that the plugin uses.
//
// This package only returns errors. The plugin ends if a document is wrong at its start. Later it
// writes an Event, and keeps in force what was before (driver/chooser.go). It does the same with
// the Node's annotations (driver/nodepolicy.go).
package settings
