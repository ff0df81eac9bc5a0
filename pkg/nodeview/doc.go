// Package nodeview knows why the node refuses to prepare devices. Parts of the driver report
// conditions, and clear them when they end.
package nodeview
