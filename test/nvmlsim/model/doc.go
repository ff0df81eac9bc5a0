// Package model reads the YAML files that describe simulated hardware. Each GPU model and each node
// has its own file.
//
// A GPU model file holds facts about a product. Each fact is a plain value, or a mapping with a
// value, a status and a source; this package ignores status and source. A node file says which GPU
// model is at which PCI address. No product or board is known to the code, so a new GPU model or
// node needs only a new file.
package model
