// Package model reads the YAML files that describe simulated hardware: one file for a GPU model, one for a node.
//
// A GPU model file holds facts about a product: every value may be written plainly or as a mapping with its status and
// source, which this package does not interpret. A node file places models at PCI addresses. Nothing about any product or
// board is built into the code: a new model or node is a new file.
package model
