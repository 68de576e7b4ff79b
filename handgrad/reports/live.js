// Renews the page of `handgrad watch`, after page.js. Only the parts that changed are replaced, so scroll, pointer and open details stay.
const parts = (root) => [...root.querySelector("main").children].map((part) => part.outerHTML);
let served = null;
const renew = (page) => {
  const main = document.querySelector("main"), fresh = new DOMParser().parseFromString(page, "text/html");
  const now = parts(fresh), same = served?.length === now.length, y = scrollY;
  const place = (summary) => `${summary.closest("section").querySelector("h2").textContent}: ${summary.textContent}`;
  const open = new Set(all("details[open] > summary").map(place));
  const sideways = all(".scroll").map((area) => area.scrollLeft);
  [...fresh.querySelector("main").children].forEach((part, i) => {
    if (same && served[i] !== now[i]) main.children[i].replaceWith(part);
    else if (!same) { if (!i) main.replaceChildren(); main.append(part); }
  });
  served = now;
  document.title = fresh.title;
  document.body.dataset.version = fresh.body.dataset.version;
  for (const summary of all("summary")) if (open.has(place(summary))) summary.parentNode.open = true;
  all(".scroll").forEach((area, i) => { area.scrollLeft = sideways[i] || 0; });
  scrollTo(0, y);
  dress();
};
const poll = async () => {
  const line = document.querySelector(".live");
  try {
    const answer = await fetch(`?after=${document.body.dataset.version}`);
    if (answer.status === 200) renew(await answer.text());
    line.classList.remove("lost");
  } catch {
    line.classList.add("lost"); // the style sheet says so; it goes on asking
  }
  setTimeout(poll, document.hidden ? 10000 : 2000);
};
poll();
