// The colors of the page: as the system has them, or as chosen.
const repaints = [];
function repaint() {
  repaints.forEach((draw) => draw());
}
document.getElementById("theme").addEventListener("change", (event) => {
  document.documentElement.dataset.theme = event.target.value;
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
