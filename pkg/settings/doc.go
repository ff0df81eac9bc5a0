// Package settings reads how an admin wants the GPUs of nodes to be offered: their partitions,
// their shares, and what health problems do. The chart's values have the same form.
//
// [Parse] reads a document from YAML. It accepts nothing that it does not know, and its errors name
// the field and its line. A document has values for all nodes, and named configurations with other
// values for some. [Document.Choose] says which one a Node has, and [Document.Compile] returns it
// in the form that the plugin uses.
package settings
