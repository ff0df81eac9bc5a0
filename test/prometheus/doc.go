// Package prometheus tests the chart's alerts and dashboards with Prometheus' own code: its
// scraper, its database, its query engine and its rule manager.
//
// It is a module of its own, so that the product does not depend on Prometheus. The real plugin
// runs on a simulated node of package nodeharness. dcgm-exporter needs DCGM and a GPU, so the file
// testdata/dcgm-exporter.txt writes its output in its format.
package prometheus
